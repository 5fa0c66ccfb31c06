"""What a test of two groups of seeds can find, given each arm's spread over seeds: to plan a margin and seeds.

python -m experiments.power 0.0093 0.0052 --seeds 3 8 10 --margin 0.015 --difference 0.01
"""

import argparse

import numpy as np
from scipy import stats

REPEATS = 20_000


def outcomes(spreads: tuple[float, float], seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """[repeats]: differences of means where the truth is 0, and half-widths of their 95 % intervals (Welch)."""
    draws = np.random.default_rng(0).normal(size=(2, REPEATS, seeds)) * np.reshape(spreads, (2, 1, 1))
    test = stats.ttest_ind(*draws, axis=-1, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return (low + high) / 2, (high - low) / 2


def powers(spreads: tuple[float, float], seeds: int, margin: float) -> tuple[float, float, float]:
    """The mean half-width; the difference that is detected with a probability of 80 %; and the probability that an interval
    lies inside ±margin, and contains 0, if there is no difference: the verdict "no difference"."""
    differences, halves = outcomes(spreads, seeds)
    said = (abs(differences) <= halves) & (abs(differences) + halves < margin)
    return halves.mean(), np.quantile(halves - differences, 0.8), np.mean(said)


def detected(spreads: tuple[float, float], seeds: int, difference: float) -> float:
    """The probability that the interval of a true difference does not contain 0."""
    differences, halves = outcomes(spreads, seeds)
    return np.mean(halves - differences < difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("spreads", type=float, nargs=2, help="standard deviations over seeds of the two arms")
    parser.add_argument("--seeds", type=int, nargs="+", required=True, help="numbers of seeds per arm to try")
    parser.add_argument("--margin", type=float, required=True)
    parser.add_argument("--difference", type=float, help="also print how likely this difference is found")
    arguments = parser.parse_args()
    for seeds in arguments.seeds:
        half, found, inside = powers(tuple(arguments.spreads), seeds, arguments.margin)
        text = f"{seeds} seeds: half-width {half:.4f}, finds {found:.4f}, says no difference (±{arguments.margin:g}) {inside:.0%}"
        if arguments.difference is not None:
            likely = detected(tuple(arguments.spreads), seeds, arguments.difference)
            text += f", finds {arguments.difference:g} with a probability of {likely:.0%}"
        print(text)


if __name__ == "__main__":
    main()

"""Draw dial.png: the final loss against the condition number where nothing but the spectrum differs (B of README.md).

python -m experiments.verdict.dial

It also prints what each spectrum gains, as a share of what PC gains, and x, y and z of the two by two.
"""

import numpy as np

from experiments.evidence import digest, read_experiments
from experiments.numbers import FOLDER, Study
from pc_recipe.files.plots import save, subplots

VERDICT = FOLDER / "verdict"
DIAL = {
    "dial-1.2": "p = 1.2",
    "dial-1": "1, control",
    "dial-0.54": "0.54",
    "dial-0.33": "1/3",
    "dial-0": "0, all equal",
}
BASE = "spectrum-base+scale-base"
CELLS = {"x": "spectrum-pc+scale-base", "y": "spectrum-base+scale-pc", "z": "spectrum-pc+scale-pc"}
OTHERS = {"baseline": "baseline", "level-4": "PC, with larger norms and steps"}


def share(study: Study, arm: str, control: str = "dial-1") -> str:
    """(control - arm) / (baseline - level 4) with its 95 % interval: seeds of each arm are drawn separately, with
    replacement, 10,000 times."""
    random, arms = np.random.default_rng(0), (control, arm, "baseline", "level-4")
    drawn = [random.choice(study[name].losses, (10_000, study[name].n)).mean(1) for name in arms]
    base, changed, baseline, pc = (np.append(study[name].mean, means) for name, means in zip(arms, drawn, strict=True))
    shares = (base - changed) / (baseline - pc)
    return "{:.0%} ({:.0%} to {:.0%})".format(shares[0], *np.quantile(shares[1:], [0.025, 0.975]))


def main() -> None:
    studies = {one.study: Study(one, paired=False) for one in read_experiments(VERDICT)}
    study, cells = studies["5"], studies["cells"]
    figure, axes = subplots(width=5.0, height=3.2)
    axes.plot([study[arm].end for arm in DIAL], [study[arm].mean for arm in DIAL], color="C0", linewidth=1)
    for arm, name in (DIAL | OTHERS).items():
        tested, color = study[arm], "C0" if arm in DIAL else "C1"
        error = [[tested.mean - tested.interval.low], [tested.interval.high - tested.mean]]
        axes.errorbar(tested.end, tested.mean, yerr=error, fmt="o", color=color, markersize=4, capsize=2)
        place, side = ((-6, 4), "right") if arm == "baseline" else ((6, 4 if arm == "dial-0" else -9), "left")
        axes.annotate(
            name, (tested.end, tested.mean), place, textcoords="offset points", color=color, fontsize=8, ha=side
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("condition number of o and ffn at the end")
    axes.set_ylabel("final validation loss (nats per byte)")
    for arm, name in DIAL.items():
        print(f"{name}: {share(study, arm)}")
    for name, arm in CELLS.items():
        print(f"{name}: {share(cells, arm, BASE)}")
    print(save(figure, VERDICT / "dial", metadata={"Rows": digest(VERDICT)}))


if __name__ == "__main__":
    main()

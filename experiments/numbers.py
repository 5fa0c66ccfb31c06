"""Numbers that pages quote, recomputed from the rows of the studies; `numbers.toml` lists them.

A number is written there as {study[arms].quantity:rounding}. `arms` is an arm, or "arm - other", each at its best rate; with
" at 47" after it, by the losses after 47 tokens per parameter, not the final ones. Quantities are those of `Tested`.
"""

import math
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from experiments.contrasts import compare_means, read_preregistration
from experiments.evidence import CONDITION, Experiment, curve, read_experiments, without_tuning_seeds
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.report.curves import speedup

FOLDER = Path(__file__).parent
FOLDERS = ("conditioning", "rivals", "rivals/again", "regime", "small", "verdict")


class Tested:
    """An arm, or its difference from another, on the seeds that chose no rate.

    As text: its mean and 95 % interval by the study's plan. A negative difference loses its sign unless the rounding begins
    with "+". Quantities: `mean`; `by`, its absolute value. For an arm: `losses`, `sd` over `n` seeds, `bits` per byte, and
    of the condition number the `end` and the `path`, "start to end (largest)", means over seeds. For a difference: `fewer`,
    how many times fewer tokens the arm needs, by seed.

    Args:
        paired: whether differences are by seed (Student) or between two groups (Welch).
    """

    def __init__(self, experiment: Experiment, paired: bool, key: str) -> None:
        arms, _, at = key.partition(" at ")
        arm, *others = arms.split(" - ")
        self.experiment, logs = experiment, _logs(experiment, arm)
        self.losses = values = logs.map(lambda log: _loss(log, experiment, at))
        self.mean, self.sd, self.n = values.mean(), values.std(), len(values)
        self._test: Callable[[], Any] = partial(stats.ttest_1samp, values, 0)
        for other in others:
            of_other = _logs(experiment, other)
            both = pd.concat([of_other, logs], axis=1).dropna()
            losses = [[curve(log, VALIDATION) for log in pair] for pair in both.itertuples(index=False)]
            self.fewer = pd.Series([speedup(*pair) for pair in losses]).mean()
            subtracted = of_other.map(lambda log: _loss(log, experiment, at))
            pair = (values[both.index], subtracted[both.index]) if paired else (values, subtracted)
            self.mean, self.n = pair[0].mean() - pair[1].mean(), len(pair[0])
            self._test = partial(compare_means, *pair, paired)
        self.is_difference = bool(others)
        self.by, self.bits = abs(self.mean), self.mean / math.log(2)
        conditions = pd.concat([curve(log, CONDITION[0]) for log in logs], axis=1).mean(axis=1)
        self.end = conditions.iloc[-1]
        self.path = f"{conditions.iloc[0]:.1f} to {self.end:.1f}"
        if conditions.max() > self.end:
            self.path += f" ({conditions.max():.1f})"

    @property
    def interval(self) -> Any:
        """The 95 % interval, `low` and `high`; NaN for an arm with one seed."""
        return self._test().confidence_interval()

    def __format__(self, rounding: str) -> str:
        ends = self.interval
        numbers = [self.mean, *ends]
        if self.is_difference and self.mean < 0 and not rounding.startswith("+"):
            numbers = [-self.mean, -ends.high, -ends.low]
        mean, low, high = (format(number, rounding) for number in numbers)
        return f"{mean} ({low} to {high})"

    @property
    def effective(self) -> float:
        """How many times the arm's tokens its study's baseline would need for this loss, by the power law through the final
        losses of the baselines at 5 and 20 tokens per parameter."""
        short, long = studies()["verdict-5"]["baseline"].mean, studies()["verdict-20"]["baseline"].mean
        power = math.log(short / long) / math.log(4)
        return math.exp(math.log(Tested(self.experiment, True, "baseline").mean / self.mean) / power)


class Study(dict):
    """{arms: Tested} of one experiment, each made on first use."""

    def __init__(self, experiment: Experiment, paired: bool) -> None:
        self.experiment, self.paired = experiment, paired

    def __missing__(self, key: str) -> Tested:
        self[key] = Tested(self.experiment, self.paired, key)
        return self[key]


def _logs(experiment: Experiment, arm: str) -> pd.Series:
    """[seed]: the logs of an arm's tested runs."""
    runs = experiment.runs
    tested = without_tuning_seeds(runs[runs.best & (runs.arm == arm)])
    assert len(tested), f"{experiment.name} has no arm {arm}"
    assert np.isfinite(tested.loss).all(), f"{experiment.name}: a run of {arm} diverged, so it has no numbers"
    return tested.set_index("seed").log


def _loss(log: pd.DataFrame, experiment: Experiment, at: str) -> float:
    losses = curve(log, VALIDATION)
    if not at:
        return losses.iloc[-1]
    return losses.iloc[abs(losses.index / experiment.parameters - int(at)).argmin()]


@cache
def studies() -> dict[str, Study]:
    """Studies by name; names of the verdict's begin with "verdict-"."""
    found = {}
    for name in FOLDERS:
        paired = read_preregistration(FOLDER / name).paired
        for one in read_experiments(FOLDER / name):
            found[f"verdict-{one.study}" if name == "verdict" else one.study] = Study(one, paired)
    return found


def of_pages() -> dict[str, list[str]]:
    """{page: texts that it must contain}, with numbers from today's rows."""
    pages = tomllib.loads((FOLDER / "numbers.toml").read_text())
    return {page: [text.format_map(studies()) for text in texts] for page, texts in pages.items()}

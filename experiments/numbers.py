"""Numbers that pages quote, computed again from the rows of the studies; `numbers.toml` says which.

A number is written there as {study[arms].quantity:rounding}. `arms` is an arm, or "arm - other", each at its best rate; with
" at 47", by the losses after 47 tokens per parameter in place of the final ones. Quantities are those of `Tested`.
"""

import math
import tomllib
from functools import cache
from pathlib import Path

import pandas as pd
from scipy import stats

from experiments.evidence import CONDITION, Experiment, curve, read_experiments, without_tuning_seeds
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.report.curves import speedup

FOLDER = Path(__file__).parent
FOLDERS = ("conditioning", "rivals", "rivals/again", "regime", "small")
AT_A_QUARTER = 1.7856
"""Final loss of the baseline of cell-20 with a quarter of the tokens: a pilot of experiments/verdict, one seed."""


class Tested:
    """An arm, or its difference to another by seed, on the seeds that chose no rate.

    Formatted, its mean and 95 % interval (Student), of a difference without signs unless the rounding begins with "+".
    Quantities: `mean`; `by`, its size; `sd` over `n` seeds; `bits` per byte; of an arm the condition number at its `end`, and
    its `path`, "start to end (largest)", means over seeds; of a difference `fewer`, how many times fewer tokens the arm needs.
    """

    def __init__(self, experiment: Experiment, key: str) -> None:
        arms, _, at = key.partition(" at ")
        arm, *others = arms.split(" - ")
        logs = _logs(experiment, arm)
        self.values = logs.map(lambda log: _loss(log, experiment, at))
        for other in others:
            both = pd.concat([_logs(experiment, other), logs], axis=1).dropna()
            losses = [[curve(log, VALIDATION) for log in pair] for pair in both.itertuples(index=False)]
            self.fewer = pd.Series([speedup(*pair) for pair in losses]).mean()
            self.values = (self.values - both.iloc[:, 0].map(lambda log: _loss(log, experiment, at))).dropna()
        self.mean, self.sd, self.n = self.values.mean(), self.values.std(), len(self.values)
        self.is_difference = bool(others)
        self.by, self.bits = abs(self.mean), self.mean / math.log(2)
        conditions = pd.concat([curve(log, CONDITION[0]) for log in logs], axis=1).mean(axis=1)
        self.end = conditions.iloc[-1]
        self.path = f"{conditions.iloc[0]:.1f} to {self.end:.1f}"
        if conditions.max() > self.end:
            self.path += f" ({conditions.max():.1f})"

    def __format__(self, rounding: str) -> str:
        ends = stats.ttest_1samp(self.values, 0).confidence_interval()
        numbers = [self.mean, *ends]
        if self.is_difference and self.mean < 0 and not rounding.startswith("+"):
            numbers = [-self.mean, -ends.high, -ends.low]
        mean, low, high = (format(number, rounding) for number in numbers)
        return f"{mean} ({low} to {high})"

    @property
    def effective(self) -> float:
        """Tokens that the baseline would need for this loss / those of the arm, on the power law through two ends of its decay."""
        baseline = studies()["cell-20"]["baseline"].mean
        return math.exp(math.log(baseline / self.mean) / (math.log(AT_A_QUARTER / baseline) / math.log(4)))


class Study(dict):
    """{arms: Tested} of one experiment, each made when it is asked for."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def __missing__(self, key: str) -> Tested:
        self[key] = Tested(self.experiment, key)
        return self[key]


def _logs(experiment: Experiment, arm: str) -> pd.Series:
    """[seed]: the logs of an arm's tested runs."""
    runs = experiment.runs
    tested = without_tuning_seeds(runs[runs.best & (runs.arm == arm)])
    assert len(tested), f"{experiment.name} has no arm {arm}"
    return tested.set_index("seed").log


def _loss(log: pd.DataFrame, experiment: Experiment, at: str) -> float:
    losses = curve(log, VALIDATION)
    if not at:
        return losses.iloc[-1]
    return losses.iloc[abs(losses.index / experiment.parameters - int(at)).argmin()]


@cache
def studies() -> dict[str, Study]:
    return {one.study: Study(one) for name in FOLDERS for one in read_experiments(FOLDER / name)}


def of_pages() -> dict[str, list[str]]:
    """{page: texts that stand in it}, with their numbers of today's rows."""
    pages = tomllib.loads((FOLDER / "numbers.toml").read_text())
    return {page: [text.format_map(studies()) for text in texts] for page, texts in pages.items()}

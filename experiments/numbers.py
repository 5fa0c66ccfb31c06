"""Numbers that pages quote, computed from the rows of the studies and from the records of results/.

Marks in the pages name them (`experiments.pages`): a study by its name with "_" for "-", and in brackets an arm, or
"arm - other", each at its best rate; with " at 47" after it, by the losses after 47 tokens per parameter, not the final ones.
"""

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import brentq

from experiments.contrasts import Preregistration, compare_means, contrast_table, read_preregistration
from experiments.evidence import CONDITION, SIZES, Experiment, curve, read_experiments, summary, without_tuning_seeds
from experiments.tables import plain
from pc_recipe.config import load_config
from pc_recipe.files import look
from pc_recipe.files.record import read
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.pages import markdown
from pc_recipe.plan.cost import RunCost, StepCost

FOLDER = Path(__file__).parent
CONFIGS = FOLDER.parent / "train_configs"
RESULTS = FOLDER.parent / "results"
NAMED = ("verdict", "initialisation")  # both name studies by tokens per parameter


class Estimate(NamedTuple):
    """A number and its range. As text: "0.051 (0.042 to 0.060)"."""

    value: float
    low: float
    high: float

    def __format__(self, rounding: str) -> str:
        value, low, high = (format(number, rounding) for number in self)
        return f"{value} ({low} to {high})"


class Tested:
    """An arm, or its difference from another, on the seeds that chose no rate.

    As text: its mean and 95 % interval by the study's plan. A negative difference loses its sign unless the rounding begins
    with "+".

    Args:
        paired: whether differences are by seed (Student) or between two groups (Welch).
    """

    def __init__(self, experiment: Experiment, paired: bool, key: str) -> None:
        arms, _, at = key.partition(" at ")
        arm, *others = arms.split(" - ")
        runs = _runs(experiment, arm)
        self.name, self.rate, self.logs = arm, runs.rate.iloc[0], runs.log
        self.losses = values = self.logs.map(lambda log: _loss(log, experiment, at))
        self.mean, self.sd, self.n = values.mean(), values.std(), len(values)
        self._test: Callable[[], Any] = partial(stats.ttest_1samp, values, 0)
        for other in others:
            subtracted = _runs(experiment, other).log.map(lambda log: _loss(log, experiment, at))
            if paired:
                seeds = values.index.intersection(subtracted.index)
                values, subtracted = values[seeds], subtracted[seeds]
            self.mean, self.n = values.mean() - subtracted.mean(), len(values)
            self._test = partial(compare_means, values, subtracted, paired)
        self.is_difference = bool(others)

    @property
    def by(self) -> float:
        return abs(self.mean)

    @property
    def error(self) -> float:
        """Standard error of an arm's mean."""
        return self.sd / math.sqrt(self.n)

    @property
    def p(self) -> float:
        return self._test().pvalue

    def p_outside(self, margin: float) -> float:
        """p of "the difference lies outside ±`margin`", by two one-sided tests."""
        test = self._test()
        distance = (margin - abs(self.mean)) * abs(test.statistic / self.mean)  # in standard errors
        return stats.t.sf(distance, test.df)

    @property
    def interval(self) -> Any:
        """The 95 % interval, `low` and `high`; NaN for an arm with one seed."""
        return self._test().confidence_interval()

    def __format__(self, rounding: str) -> str:
        estimate = Estimate(self.mean, *self.interval)
        if self.is_difference and self.mean < 0 and not rounding.startswith("+"):
            estimate = Estimate(-self.mean, -estimate.high, -estimate.low)
        return format(estimate, rounding)

    def __sub__(self, other: "Tested") -> Estimate:
        """The difference of two arms of different studies, with its 95 % interval (Welch)."""
        test = compare_means(self.losses, other.losses, paired=False)
        return Estimate(self.mean - other.mean, *test.confidence_interval())

    def _ends(self, key: str) -> float:
        return self.logs.map(lambda log: summary(log, key)).mean()

    @property
    def condition(self) -> float:
        """The condition number of the blocks with PC at the end, mean over seeds."""
        return self._ends(CONDITION[0])

    @property
    def qkv(self) -> float:
        """That of q, k, v."""
        return self._ends(CONDITION[1])

    @property
    def norm(self) -> float:
        """The norm of the blocks with PC at the end."""
        return self._ends(list(SIZES)[0])

    @property
    def step(self) -> float:
        """Their mean relative step."""
        return self._ends(list(SIZES)[1])

    @property
    def path(self) -> str:
        """Their condition number, "start to end (largest)", of the mean over seeds."""
        conditions = pd.concat([curve(log, CONDITION[0]) for log in self.logs], axis=1).mean(axis=1)
        first, largest, last = conditions.iloc[0], conditions.max(), conditions.iloc[-1]
        return f"{first:.1f} to {last:.1f}" + (f" ({largest:.1f})" if largest > last else "")


class Study(dict):
    """{arms: Tested} of one experiment, each made on first use."""

    def __init__(self, experiment: Experiment, plan: Preregistration) -> None:
        self.experiment, self.plan = experiment, plan

    def __missing__(self, key: str) -> Tested:
        self[key] = Tested(self.experiment, self.plan.paired, key)
        return self[key]

    def contrasts(self) -> str:
        """The table of the plan's tests."""
        return contrast_table(self.experiment.runs, self.plan)

    def arms(self, *names: str) -> str:
        """A table of arms (default: all), lowest mean loss first: final loss with the standard deviation over seeds, and what
        the weights are like; of what was not logged there is no column."""
        arms = sorted((self[name] for name in names or self.experiment.runs.arm.unique()), key=lambda arm: arm.mean)
        columns = {
            "condition number of o and ffn": [f"{arm.condition:.1f}" for arm in arms],
            "of q, k, v": [f"{arm.qkv:.0f}" for arm in arms],
            "norm of o and ffn": [f"{arm.norm:.0f}" for arm in arms],
            "mean relative step": [f"{arm.step:.4f}" for arm in arms],
        }
        columns = {name: cells for name, cells in columns.items() if "nan" not in cells}
        firsts = [[plain(arm.name), f"{arm.rate:.4g}", arm.n, f"{arm.mean:.4f} ± {arm.sd:.4f}"] for arm in arms]
        rows = [[*first, *others] for first, *others in zip(firsts, *columns.values(), strict=True)]
        return markdown.table(["arm", "rate", "seeds", "final loss", *columns], rows)

    def by_seed(self, key: str) -> Tested:
        """A difference by seed, whatever the plan says."""
        return Tested(self.experiment, True, key)

    def tuned(self, arm: str, rate: float) -> float:
        """The mean final loss of an arm at a rate, on the seeds that chose it."""
        runs = self.experiment.runs
        losses = runs.loss[(runs.arm == arm) & np.isclose(runs.rate, rate) & runs.chose]
        assert len(losses), f"{self.experiment.name} has no tuning run of {arm} at {rate}"
        return losses.mean()

    def tuning(self) -> str:
        """A table of what was tuned, by arm and rate: the final loss of each tuning seed, lowest mean first; below it what has
        run with fewer seeds."""
        runs = self.experiment.runs
        losses = runs[runs.chose].pivot(index=["arm", "rate"], columns="seed", values="loss")
        order = sorted(losses.index, key=lambda at: (-losses.loc[at].count(), losses.loc[at].mean()))
        cells = [["" if math.isnan(loss) else f"{loss:.4f}" for loss in losses.loc[at]] for at in order]
        rows = [[arm, f"{rate:.4g}", *losses] for (arm, rate), losses in zip(order, cells, strict=True)]
        return markdown.table(["arm", "rate", *(f"seed {seed}" for seed in losses.columns)], rows)

    def share(self, arm: str, control: str) -> Estimate:
        """(control - arm) / (baseline - level 4) with its 95 % interval: seeds of each arm are drawn separately, with
        replacement, 10,000 times."""
        random, arms = np.random.default_rng(0), (control, arm, "baseline", "level-4")
        drawn = {name: random.choice(self[name].losses, (10_000, self[name].n)).mean(1) for name in dict.fromkeys(arms)}
        base, changed, baseline, pc = (np.append(self[name].mean, drawn[name]) for name in arms)
        shares = (base - changed) / (baseline - pc)
        return Estimate(shares[0], *np.quantile(shares[1:], [0.025, 0.975]))


def _runs(experiment: Experiment, arm: str) -> pd.DataFrame:
    """[seed]: an arm's tested runs."""
    runs = experiment.runs
    tested = without_tuning_seeds(runs[runs.best & (runs.arm == arm)])
    assert len(tested), f"{experiment.name} has no arm {arm}"
    assert np.isfinite(tested.loss).all(), f"{experiment.name}: a run of {arm} diverged, so it has no numbers"
    return tested.set_index("seed")


def _loss(log: pd.DataFrame, experiment: Experiment, at: str) -> float:
    losses = curve(log, VALIDATION)
    if not at:
        return losses.iloc[-1]
    return losses.iloc[abs(losses.index / experiment.parameters - int(at)).argmin()]


@cache
def studies() -> dict[str, Study]:
    """Studies by name, of all folders with rows; where a folder's name is in `NAMED`, the study's name begins with it."""
    found = {}
    for folder in sorted(file.parent for file in FOLDER.glob("**/runs.jsonl")):
        plan = read_preregistration(folder)
        for one in read_experiments(folder):
            found[f"{folder.name}-{one.study}" if folder.name in NAMED else one.study] = Study(one, plan)
    return found


def count(folder: str, commit: str, with_pc: bool = False) -> int:
    """Runs of a commit in a folder's rows."""
    lines = read(FOLDER / folder / "runs.jsonl", dict)
    mine = [line for line in lines if line["environment"]["commit"].startswith(commit)]
    return sum(line["resolved"]["pc"]["enable"] or not with_pc for line in mine)


@cache
def loss_curve() -> tuple[float, float, float]:
    """(c, a, b) of c + a t^-b through AdamW's losses at t = 5, 20 and 40 tokens per parameter."""
    short, middle, long = (studies()[f"verdict-{t}"]["baseline"].mean for t in (5, 20, 40))

    def falls(b: float) -> float:
        return (5**-b - 20**-b) / (20**-b - 40**-b)

    b = brentq(lambda b: falls(b) - (short - middle) / (middle - long), 0.01, 5)
    a = (middle - long) / (20**-b - 40**-b)
    return long - a * 40**-b, a, b


def adamw_tokens(difference: Tested) -> float:
    """How many times as many tokens as 20 per parameter AdamW needs to end as much lower as an arm does at 20."""
    c, a, b = loss_curve()
    return (a / (studies()["verdict-20"]["baseline"].mean + difference.mean - c)) ** (1 / b) / 20


@cache
def record(folder: str, row: str) -> dict:
    """A record of results/`folder`: the file row.json, or the line of that name in measurements.jsonl."""
    file = RESULTS / folder / f"{row}.json"
    if look.is_file(file):
        return json.loads(file.read_text())
    return {line["name"]: line["record"] for line in read(file.with_name("measurements.jsonl"), dict)}[row]


def table_of(folder: str) -> str:
    """The table of results/`folder`/README.md."""
    lines = (RESULTS / folder / "README.md").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("|"))


cpu = partial(record, "2026-11-21-cpu-step")
gpu = partial(record, "2026-11-26-gpu")
precision = partial(record, "2026-11-29-precision")


def figure(record: dict, name: str) -> Estimate:
    """The median of a figure of `benchmarks/step.py`, and its range."""
    return Estimate(*(record["figures"][name][key] for key in ("median", "smallest", "largest")))


def final_difference(record: dict, precision: str) -> float:
    """Nats between the losses at the end of training with `precision` and with float32 (`benchmarks/precision.py --train`)."""
    return abs(record["runs"][precision]["loss"][-1] - record["runs"]["float32"]["loss"][-1])


def power_iterations(steps: int) -> float:
    """The largest error of s in the first 35 steps, by iterations per update: of a median over a block's matrices."""
    lines = cpu("power-iterations")[str(steps)]
    return max(error for line in lines for name, error in line.items() if name.endswith("/median"))


@cache
def cost(config: str, ranks: int, *overrides: str) -> StepCost:
    """What `scripts/cost.py` counts for a step of train_configs/`config`.toml."""
    return RunCost(load_config(CONFIGS / f"{config}.toml", list(overrides)), ranks).step_cost()


def released(optimizer: str, row: str) -> tuple[float, float]:
    """The largest difference in loss from the released trainer in the steps of a row, and the largest relative one."""
    trainers = record("2026-11-22-released-trainer", "trainers_again")["trainers"]
    one = next(one for one in trainers if (one["optimizer"], one["row"]) == (optimizer, row))
    ours, theirs = map(np.array, (one["ours"], one["released"]))
    return abs(ours - theirs).max(), (abs(ours - theirs) / theirs).max()

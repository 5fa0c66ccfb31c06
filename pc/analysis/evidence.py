"""Runs of sweeps as evidence: arms, each at its own best learning rate, and their differences by seed.

An *arm* is one combination of a sweep's settings without the learning rate; the first arm is the reference. An arm's
rate is the one with the lowest final validation loss on the first seed. If other seeds were run at that rate, only they
are used, so that no figure is one by which the rate was chosen. An *experiment* is the arms of one model size, number of
steps and optimizer; a *study* is one or several experiments that are reported together.

An experiment's folder has `runs.jsonl`, one line per run with its config, environment and log, and what
`pc.analysis.evidence_report` makes from it: `tables.md` and a figure for each study.
"""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pandas as pd
import torch

from pc.common.files import write_atomically
from pc.common.run_folder import read_log, unique_names
from pc.errors import UserError
from pc.settings.schema import Config
from pc.sweep.bars import read_results
from pc.sweep.spec import VALIDATION, label
from pc.titan.llama2 import Llama2, model_args

RATE = "optimizer.lr"
CONDITION = ("spectra/gmcn/pc", "spectra/gmcn/qkv", "spectra/gmcn/all")


def collect(sweeps: Sequence[Path], study: str, output: Path) -> int:
    """Write the finished and diverged runs of `sweeps` into `output`/runs.jsonl as `study`; returns their number.

    Earlier lines of that study are replaced. Of a run's log it keeps validation losses and condition numbers.
    """
    file = output / "runs.jsonl"
    others = [line for line in _read(file) if line["study"] != study] if file.exists() else []
    lines = [line for sweep in sweeps for result in read_results(sweep) if (line := _line(study, sweep, result))]
    if not lines:
        raise UserError(f"{', '.join(map(str, sweeps))}: no finished run with a {VALIDATION}")
    write_atomically(file, "".join(json.dumps(line, allow_nan=False) + "\n" for line in others + lines))
    return len(lines)


def _read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _line(study: str, sweep: Path, result: dict) -> dict | None:
    """A run's line; None if it was never validated and did not diverge."""
    folder = sweep / result["name"] if (sweep / result["name"]).is_dir() else Path(result["folder"])
    run = read_log(folder)
    last = run.series(VALIDATION).tail(1)
    diverged = result.get("state") == "diverged" or last.isna().any()
    if last.empty and not diverged:
        return None
    log = pd.DataFrame(run.lines).groupby("step", as_index=False).last()  # the last value of each quantity in a step
    log = log.filter(regex=f"^(step|tokens|{VALIDATION}|spectra/gmcn/.*)$").dropna(thresh=3)
    return {
        "study": study,
        **{key: result.get(key) for key in ("name", "config", "settings", "spikes")},
        "state": "diverged" if diverged else "finished",
        "resolved": tomllib.loads((folder / "config.toml").read_text()),
        "environment": json.loads((folder / "environment.json").read_text()),
        "log": json.loads(log.to_json(orient="records")),  # NaN becomes null
    }


@dataclass(frozen=True)
class Arm:
    """Runs that differ only in learning rate and seed."""

    name: str
    losses: pd.DataFrame
    """[learning rate, seed]: final validation loss in nats per token; infinite if the run diverged, NaN if not run"""
    logs: dict[tuple[float, int], pd.DataFrame]
    """{(learning rate, seed): [tokens, quantity]}"""

    @cached_property
    def first_seed(self) -> int:
        """The first seed that ran at the most rates; it chooses the rate."""
        return self.losses.count().idxmax()

    @property
    def choosing(self) -> list[int]:
        """The seed by which the rate was chosen; none if there is only one rate."""
        return [self.first_seed] if len(self.losses) > 1 else []

    @property
    def best_rate(self) -> float:
        """The rate with the lowest loss on the first seed."""
        return self.losses[self.first_seed].idxmin()

    def judged(self, rate: float) -> pd.Series:
        """Final losses at `rate` by seed, without the seed that chose it if there are others."""
        return _without(self.losses.loc[rate].dropna(), self.choosing)

    def course(self, key: str, rate: float, seed: int) -> pd.Series:
        """What the run logged under `key`, by tokens."""
        log = self.logs[rate, seed]
        return log[key].dropna() if key in log else pd.Series(dtype=float)


def _without(values: pd.Series, choosing: Sequence[int]) -> pd.Series:
    """`values` by seed without the `choosing` ones, if any are left."""
    others = values.drop(choosing, errors="ignore")
    return values if others.empty else others


@dataclass(frozen=True)
class Pair:
    """An arm at one of its rates and the reference at one of its own, run by run of the same seed."""

    arm: Arm
    rate: float
    reference: Arm
    its_rate: float

    @property
    def at_best(self) -> bool:
        return (self.rate, self.its_rate) == (self.arm.best_rate, self.reference.best_rate)

    @cached_property
    def differences(self) -> pd.Series:
        """Final losses of the arm minus the reference's, by seed; infinite or NaN if one diverged.

        Seeds run in both, without those that chose the rates if there are others.
        """
        ours, theirs = self.arm.losses.loc[self.rate].dropna(), self.reference.losses.loc[self.its_rate].dropna()
        ours, theirs = ours.align(theirs, join="inner")
        return _without(ours - theirs, self.arm.choosing + self.reference.choosing)

    @property
    def is_test(self) -> bool:
        """Whether none of its seeds chose a rate."""
        return not set(self.differences.index) & {*self.arm.choosing, *self.reference.choosing}

    def both(self, seed: int) -> tuple[pd.Series, pd.Series]:
        """Validation losses by tokens of the reference and of the arm."""
        theirs = self.reference.course(VALIDATION, self.its_rate, seed)
        return theirs, self.arm.course(VALIDATION, self.rate, seed)

    @property
    def courses(self) -> pd.DataFrame:
        """[tokens, seed]: differences of validation losses where both runs were validated."""
        both = {seed: self.both(seed) for seed in self.differences.index}
        return pd.DataFrame({seed: ours - theirs for seed, (theirs, ours) in both.items()})


def pairs(arms: Sequence[Arm]) -> list[Pair]:
    """What is compared with the reference, the first arm; those at the best rates of both come first.

    Then both at the reference's best rate, and each arm at its own against other rates of the reference with several
    common seeds.
    """
    reference, best = arms[0], arms[0].best_rate
    found = []
    for arm in arms[1:]:
        at_best = [Pair(arm, rate, reference, best) for rate in arm.losses.index if rate in (best, arm.best_rate)]
        others = [Pair(arm, arm.best_rate, reference, rate) for rate in reference.losses.index if rate != best]
        found += [pair for pair in at_best if len(pair.differences)]
        found += [pair for pair in others if len(pair.differences) > 1]
    return sorted(found, key=lambda pair: not pair.at_best)


@dataclass(frozen=True)
class Experiment:
    """The arms of one model size, number of steps and optimizer."""

    study: str
    name: str
    """the study's, with what differs from its other experiments"""
    arms: list[Arm]
    """the first one is the reference"""
    config: Config
    """of the reference, whatever its learning rate"""

    @property
    def parameters(self) -> int:
        return parameters(self.config.model.flavor, self.config.model.vocab_size)

    @property
    def tokens_per_parameter(self) -> float:
        """Of a whole run; the tokens of a step are those of the first run's log."""
        log = next(iter(self.arms[0].logs.values()))
        return self.config.training.steps * log.index[-1] / log.step.iloc[-1] / self.parameters


@cache
def parameters(flavor: str, vocab_size: int) -> int:
    """Of the whole model, without gammas."""
    with torch.device("meta"):
        return sum(p.numel() for p in Llama2(model_args(flavor, vocab_size=vocab_size, max_seq_len=2)).parameters())


def read_experiments(folder: Path) -> list[Experiment]:
    """The experiments of `folder`/runs.jsonl, with their arms in the order of their first runs.

    If an experiment has several configs, the config is part of an arm's name.

    Raises:
        UserError: two runs of one arm, rate and seed have different validation losses.
    """
    file = folder / "runs.jsonl"
    groups: dict[tuple, list[tuple[dict, Config]]] = {}
    for line in _read(file):
        config = Config.model_validate(line["resolved"], extra="ignore")  # written by any version
        kind = config.model.flavor, config.optimizer.name, config.training.steps
        groups.setdefault((line["study"], *kind), []).append((line, config))
    studies = [study for study, *_ in groups]
    experiments = []
    for (study, flavor, optimizer, steps), runs in groups.items():
        name = study if studies.count(study) == 1 else f"{study}: {flavor}, {optimizer}, {steps:,} steps"
        experiments.append(Experiment(study, name, _arms(runs, file), runs[0][1]))
    return experiments


def _arms(runs: Sequence[tuple[dict, Config]], file: Path) -> list[Arm]:
    """Arms are named by PC on or off and by the settings in which the runs differ."""
    files = list(dict.fromkeys(line["config"] for line, _ in runs))
    names = dict(zip(files, unique_names([Path(name).with_suffix("") for name in files]), strict=True))
    settings = [{"pc.enable": config.pc.enable} | line["settings"] for line, config in runs]
    keys = {key for one in settings for key in one} - {RATE}
    varied = {key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)} | {"pc.enable"}
    arms: dict[str, dict[tuple[float, int], tuple[float, pd.DataFrame]]] = {}
    for (line, config), one in zip(runs, settings, strict=True):
        words = [names[line["config"]]] * (len(files) > 1)
        name = ", ".join([*words, label({key: value for key, value in one.items() if key in varied})])
        log = pd.DataFrame(line["log"]).set_index("tokens")
        loss = math.inf if line["state"] == "diverged" else log[VALIDATION].dropna().iloc[-1]
        arm = arms.setdefault(name, {})
        if arm.setdefault((config.optimizer.lr, config.debug.seed or 0), (loss, log))[0] != loss:
            raise UserError(
                f"{file}: {line['name']} is a second run of {name} with the same learning rate and seed but a "
                "different validation loss; collect them as two studies"
            )
    return [
        Arm(
            name,
            pd.Series({at: loss for at, (loss, _) in arm.items()}).unstack(),
            {at: log for at, (_, log) in arm.items()},
        )
        for name, arm in arms.items()
    ]

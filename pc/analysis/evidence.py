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
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from pc.analysis.bars import read_results
from pc.analysis.curves import VALIDATION
from pc.common.files import write_atomically
from pc.common.run_folder import RunLog, read_log, unique_names
from pc.errors import UserError
from pc.settings.models import FLAVORS
from pc.sweep.spec import label
from pc.titan.llama2 import Llama2, model_args

RATE = "optimizer.lr"
TORCHTITANS_RATE = 8e-4  # its default
CONDITION = ("spectra/gmcn/pc", "spectra/gmcn/qkv", "spectra/gmcn/all")
ESTIMATE_ERROR = "spectra/estimate_error/"
RMS = ("signal/attention/rms/", "signal/ffn/rms/")
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t for 1 to 10 degrees of freedom; the last, a little too wide, serves for more"""


# --- runs.jsonl -------------------------------------------------------------------------------------


def collect(sweeps: Sequence[Path], study: str, output: Path) -> int:
    """Write the finished and diverged runs of `sweeps` into `output`/runs.jsonl as `study`; returns their number.

    Earlier lines of that study are replaced. Of a run's log it keeps validation losses, condition numbers, errors of
    the estimate, and the largest RMS over the layers.
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
    """A run's line; None if it was never validated and did not diverge. A diverged run ends with a loss of null."""
    folder = sweep / result["name"] if (sweep / result["name"]).is_dir() else Path(result["folder"])
    steps: dict[int, dict] = {}
    for line in read_log(folder).lines:
        steps.setdefault(line["step"], {}).update(_thin(line))
    if result.get("state") == "diverged":
        steps[max(steps)][VALIDATION] = None
    log = [line for line in _rising_rms(steps.values()) if line.keys() - {"step", "tokens"}]
    if not any(VALIDATION in line for line in log):
        return None
    return {
        "study": study,
        **{key: result.get(key) for key in ("name", "config", "settings", "state", "spikes")},
        "resolved": tomllib.loads((folder / "config.toml").read_text()),
        "environment": json.loads((folder / "environment.json").read_text()),
        "log": log,
    }


def _rising_rms(lines: Iterable[dict]) -> Iterator[dict]:
    """The lines without RMS below an earlier one: tables show the largest."""
    largest: dict[str, float] = {}
    for line in lines:
        for key in line.keys() & {prefix + "max" for prefix in RMS}:
            if line[key] <= largest.get(key, -math.inf):
                line = {other: value for other, value in line.items() if other != key}
            else:
                largest[key] = line[key]
        yield line


def _thin(line: dict) -> dict:
    whole = ("step", "tokens", VALIDATION, *CONDITION)
    kept = {key: value for key, value in line.items() if key in whole or key.startswith(ESTIMATE_ERROR)}
    for prefix in RMS:
        values = [value for key, value in line.items() if key.startswith(prefix) and value is not None]
        if values:
            kept[prefix + "max"] = max(values)
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in kept.items()}


# --- arms -------------------------------------------------------------------------------------------


@dataclass
class Arm:
    """Runs that differ only in learning rate and seed."""

    name: str
    runs: dict[float, dict[int, RunLog]] = field(default_factory=dict)
    """{learning rate: {seed: run}}"""

    def loss(self, rate: float, seed: int) -> float:
        """Final validation loss in nats per token; NaN counts as infinite, so that it is never the best."""
        value = self.runs[rate][seed].series(VALIDATION).values[-1]
        return value if math.isfinite(value) else math.inf

    @property
    def first_seed(self) -> int:
        """The first seed that ran at every rate; it chooses the rate."""
        common = set.intersection(*(set(runs) for runs in self.runs.values()))
        if not common:
            raise UserError(f"{self.name}: no seed has run at every learning rate")
        return min(common)

    @property
    def choosing(self) -> set[int]:
        """The seed by which the rate was chosen; empty if there is only one rate."""
        return {self.first_seed} if len(self.runs) > 1 else set()

    @property
    def best_rate(self) -> float:
        """The rate with the lowest loss on the first seed."""
        return min(self.runs, key=lambda rate: self.loss(rate, self.first_seed))

    def judged(self, rate: float) -> list[int]:
        """The seeds at `rate` without the one that chose it, or only that one if there is no other."""
        seeds = sorted(self.runs[rate])
        return [seed for seed in seeds if seed not in self.choosing] or seeds

    def losses(self, rate: float) -> list[float]:
        return [self.loss(rate, seed) for seed in self.judged(rate)]


@dataclass(frozen=True)
class Experiment:
    """The arms of one model size, number of steps and optimizer."""

    study: str
    name: str
    """the study's, with what differs from its other experiments"""
    arms: list[Arm]
    """the first one is the reference"""
    config: dict[str, dict]
    """a resolved config of the reference, whatever its learning rate"""

    @property
    def parameters(self) -> int:
        return parameters(self.config["model"]["flavor"], self.config["model"]["vocab_size"])

    @property
    def tokens_per_parameter(self) -> float:
        training = self.config["training"]
        return training["steps"] * training["global_batch_size"] * training["seq_len"] / self.parameters

    @property
    def warm_up(self) -> float:
        """Its share of the steps."""
        return self.config["lr_scheduler"]["warmup_steps"] / self.config["training"]["steps"]

    @property
    def rate_times_decay(self) -> float:
        """Sum over the steps of learning rate times weight decay at the reference's best rate.

        The rate rises linearly in the warm-up and then falls along a curve that is symmetric about its middle.
        """
        mean = self.warm_up / 2 + (1 - self.warm_up) * (1 + self.config["lr_scheduler"]["min_lr_factor"]) / 2
        return (
            self.arms[0].best_rate * self.config["optimizer"]["weight_decay"] * mean * self.config["training"]["steps"]
        )

    @property
    def std_times_root_width(self) -> float:
        """Initial standard deviation of the blocks times the square root of the width."""
        model = self.config["model"]
        return model.get("init_std", 0.02) * math.sqrt(FLAVORS[model["flavor"]].dim)


@cache
def parameters(flavor: str, vocab_size: int) -> int:
    """Of the whole model, without gammas."""
    with torch.device("meta"):
        return sum(p.numel() for p in Llama2(model_args(flavor, vocab_size=vocab_size, max_seq_len=2)).parameters())


def read_experiments(folder: Path) -> list[Experiment]:
    """The experiments of `folder`/runs.jsonl, with their arms in the order of their first runs.

    If an experiment has several configs, the config is part of an arm's name.

    Raises:
        UserError: no runs.jsonl; or two runs of one arm, rate and seed have different validation losses.
    """
    file = folder / "runs.jsonl"
    if not file.is_file():
        raise UserError(f"{file}: no such file; `evidence.py collect` writes it")
    groups: dict[tuple, list[dict]] = {}
    for line in _read(file):
        section = {name: line["resolved"].get(name, {}) for name in ("model", "training", "optimizer")}
        kind = section["model"].get("flavor"), section["optimizer"].get("name"), section["training"].get("steps")
        groups.setdefault((line["study"], *kind), []).append(line)
    studies = [study for study, *_ in groups]
    experiments = []
    for (study, flavor, optimizer, steps), lines in groups.items():
        name = study if studies.count(study) == 1 else f"{study}: {flavor}, {optimizer}, {steps:,} steps"
        experiments.append(Experiment(study, name, _arms(lines, file), lines[0]["resolved"]))
    return experiments


def _arms(lines: Sequence[dict], file: Path) -> list[Arm]:
    configs = list(dict.fromkeys(line["config"] for line in lines))
    names = dict(zip(configs, unique_names([Path(config).with_suffix("") for config in configs]), strict=True))
    first = lines[0]["settings"]
    shared = {key for key in first if all(line["settings"].get(key) == first[key] for line in lines)} - {"pc.enable"}
    arms: dict[str, Arm] = {}
    for line in lines:
        settings = {key: value for key, value in line["settings"].items() if key not in shared | {RATE}}
        words = [names[line["config"]]] if len(configs) > 1 or not settings else []
        name = ", ".join(words + ([label(settings)] if settings else []))
        rate = line["resolved"].get("optimizer", {}).get("lr", TORCHTITANS_RATE)
        seed = line["resolved"].get("debug", {}).get("seed", 0)
        run = RunLog(line["name"], file, line["log"])
        other = arms.setdefault(name, Arm(name)).runs.setdefault(rate, {}).setdefault(seed, run)
        if str(other.series(VALIDATION)) != str(run.series(VALIDATION)):  # as text, because NaN is not equal to itself
            raise UserError(
                f"{file}: {other.name} and {run.name} are two runs of {name} with the same learning rate and seed but "
                "different validation losses; collect them as two studies"
            )
    return list(arms.values())


def paired_seeds(arm: Arm, rate: float, reference: Arm, its_rate: float) -> list[int]:
    """Seeds run in both arms at these rates, without the one that chose the rates if there are others."""
    common = sorted(arm.runs[rate].keys() & reference.runs[its_rate].keys())
    return [seed for seed in common if seed not in arm.choosing | reference.choosing] or common


def comparisons(arms: Sequence[Arm]) -> Iterator[tuple[Arm, float, float]]:
    """(arm, its learning rate, the reference's) of what is compared with the reference.

    Both at their best rates, then both at the reference's, then the arm at its own against other rates of the reference
    with several common seeds.
    """
    reference = arms[0]
    best = reference.best_rate
    for arm in arms[1:]:
        pairs = [(arm.best_rate, best)] + [(best, best)] * (best in arm.runs)
        for rate in reference.runs:
            if len(paired_seeds(arm, arm.best_rate, reference, rate)) > 1:
                pairs.append((arm.best_rate, rate))
        yield from ((arm, *pair) for pair in dict.fromkeys(pairs))


# --- statistics -------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t; infinite for a single value."""
    if len(values) < 2:
        return values[0], math.inf
    return statistics.fmean(values), _t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the least-squares line through (x, y), and half the width of its 95 % interval by Student's t."""
    x, y = zip(*points, strict=True)
    line = statistics.linear_regression(x, y)
    if len(points) < 3:
        return line.slope, math.inf
    variance = math.fsum((b - line.intercept - line.slope * a) ** 2 for a, b in points) / (len(points) - 2)
    spread = math.fsum((a - statistics.fmean(x)) ** 2 for a in x)
    return line.slope, _t_95(len(points) - 2) * math.sqrt(variance / spread)


def _t_95(freedom: int) -> float:
    return T_95[min(freedom, len(T_95)) - 1]


def verdict(differences: Sequence[float], margin: float) -> str:
    """What the 95 % interval of the mean difference says: better, worse, no difference (within ± `margin`), undecided."""
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return "no test"
    mean, half = interval(differences)
    if abs(mean) > half:
        return "better" if mean < 0 else "worse"
    return "no difference" if half < margin else "undecided"

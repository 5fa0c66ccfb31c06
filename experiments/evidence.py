"""Runs of sweeps as evidence: arms, each at its own best learning rate, and their differences by seed.

An *arm* is a sweep's variant, or one combination of its settings other than the learning rate (for AdamH and MuonH, the
length of a step). The first arm is the reference. An arm's rate is the one with the lowest mean final validation loss on
the tuning seeds: those that the plan names, else the first. If other seeds ran at that rate, only they are reported (of
these the test seeds, if the plan names any), so no reported loss chose the rate. An *experiment* is the arms that share
model size, vocabulary, number of steps, number and length of validation sequences, and the optimizer unless variants name
it. A *study* is one or several experiments that are reported together.

An experiment's folder has `runs.jsonl`, one line per run with its config, environment and log, and what
`experiments.tables` makes from it: `tables.md` and a figure for each study.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from experiments.contrasts import Preregistration, read_preregistration
from pc.errors import UserError
from pc_recipe.config.model_sizes import Flavor, shape_of
from pc_recipe.config.optimizers import KINDS
from pc_recipe.config.run_key import all_values, differing_keys, settings_key
from pc_recipe.config.schema import Config
from pc_recipe.files import look, record
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_log import VALIDATION, read_logs, unique_names
from pc_recipe.runs.sweep.points import read_results
from pc_recipe.runs.sweep.spec import label
from pc_recipe.train.llama2 import Llama2, Llama2Args

RATES = {"optimizer.lr", "optimizer.hyperball_lr"}
"""Settings that can be an arm's rate; its optimizer decides which."""
CONDITION = ("spectra/gmcn/pc", "spectra/gmcn/qkv", "spectra/gmcn/all")
SIZES = {"norm/effective": "their norm", "norm/relative_step": "mean relative step"}
"""{logged name: heading of its column}; of the blocks with PC"""


def collect(sweeps: Sequence[Path], study: str, output: Path) -> int:
    """Write the finished and diverged runs of `sweeps` into `output`/runs.jsonl as `study`; returns their number.

    A run that was collected before from the same folder is replaced; others stay, so several machines can share a study.
    Of a run's log only validation losses, condition numbers, and norms and steps of effective weights are kept.
    """
    file = output / "runs.jsonl"
    lines = [line for sweep in sweeps for result in read_results(sweep) if (line := _line(study, sweep, result))]
    if not lines:
        raise UserError(f"{', '.join(map(str, sweeps))}: no finished run with a {VALIDATION}")
    earlier = record.read(file, dict[str, Any]) or []
    kept = {(line["study"], line["resolved"]["job"]["dump_folder"]): line for line in earlier + lines}.values()
    write_atomically(file, "".join(json.dumps(line, allow_nan=False) + "\n" for line in kept))
    return len(lines)


def _line(study: str, sweep: Path, result: dict) -> dict | None:
    """A run's line; None if it was never validated and did not diverge."""
    folder = sweep / result["name"] if look.is_folder(sweep / result["name"]) else Path(result["folder"])
    (run,) = read_logs([folder])
    last = run.series(VALIDATION).tail(1)
    diverged = result.get("state") == "diverged" or last.isna().any()
    if last.empty and not diverged:
        return None
    log = pd.DataFrame(run.lines).groupby("step", as_index=False).last()  # the last value of each quantity in a step
    kept = {"step", "tokens", VALIDATION, *CONDITION, *SIZES}
    log = log[[key for key in log if key in kept]].dropna(thresh=3)
    line = {
        "study": study,
        **{key: result.get(key) for key in ("name", "config", "settings", "variant", "spikes")},
        "state": "diverged" if diverged else "finished",
        "resolved": tomllib.loads((folder / "config.toml").read_text()),
        "environment": json.loads((folder / "environment.json").read_text()),
        "log": json.loads(log.to_json(orient="records")),  # NaN becomes null
    }
    final_loss(line)
    return line


def final_loss(line: dict) -> float:
    """A run's loss after its last step; infinite if it diverged.

    Raises:
        UserError: the run has no such loss, because its log lost its end.
    """
    if line["state"] == "diverged":
        return math.inf
    last = [entry for entry in line["log"] if entry.get(VALIDATION) is not None][-1]
    steps = line["resolved"].get("training", {}).get("steps", Config().training.steps)
    if last["step"] != steps:
        raise UserError(
            f"{line['name']} was last validated after step {last['step']} of {steps}; its log lost its end, so train it again"
        )
    return last[VALIDATION]


@dataclass(frozen=True)
class Experiment:
    """Runs of one model size and number of steps.

    `runs` has a row for each: arm; rate; seed; loss, the final one in nats per token, infinite if the run diverged; log
    [tokens, quantity]; best, whether its rate is its arm's best; chose, whether its seed chose the best of several rates or
    is not one of the plan's test seeds. Arms are in the order of their first runs, so the reference comes first.
    """

    study: str
    name: str
    """The study's name, with what sets this experiment apart if the study has several."""
    config: Config
    """That of the reference's first run, so its learning rate need not be the best."""
    runs: pd.DataFrame

    @property
    def parameters(self) -> int:
        return parameters(shape_of(self.config.model), self.config.model.vocab_size)

    @property
    def tokens_per_parameter(self) -> float:
        """Of a whole run; tokens per step are computed from the longest log."""
        log = max(self.runs.log, key=len)
        return self.config.training.steps * log.index[-1] / log.step.iloc[-1] / self.parameters

    @property
    def reference(self) -> pd.DataFrame:
        """Runs of the first arm."""
        return self.runs[self.runs.arm == self.runs.arm[0]]

    def pairs(self) -> list[pd.DataFrame]:
        """Pairs of an arm at one rate and the reference at one rate: a row for each seed that ran in both.

        Columns are those of `runs`, the reference's with the suffix "_reference"; `difference` of the final losses, which
        is infinite or NaN if one diverged; `chose`, whether the seed chose one of the rates.

        Both at their best come first, then the reference at its best with the arm at the same rate, then the arm at its
        best with the reference at other rates, if there are several seeds.
        """
        others = self.runs[self.runs.arm != self.runs.arm[0]]
        both = others.merge(self.reference, on="seed", suffixes=("", "_reference"))
        both = both.assign(difference=both.loss - both.loss_reference, chose=both.chose | both.chose_reference)
        selected = []
        for _, rows in both.groupby(["arm", "rate", "rate_reference"], sort=False):
            pair, one = without_tuning_seeds(rows), rows.iloc[0]
            if one.best_reference and (one.best or one.rate == one.rate_reference) or one.best and len(pair) > 1:
                selected.append(pair)
        return sorted(selected, key=lambda pair: (not is_at_best(pair), not pair.best_reference.all()))


def is_at_best(pair: pd.DataFrame) -> bool:
    """Whether a pair is at the best rates of both."""
    return pair.best.all() and pair.best_reference.all()


def without_tuning_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """`runs` without those whose seed chose a rate; all of them if none would be left."""
    return runs if runs.chose.all() else runs[~runs.chose]


def curve(log: pd.DataFrame, key: str) -> pd.Series:
    """What a run logged under `key`, by tokens."""
    return log[key].dropna() if key in log else pd.Series(dtype=float)


def summary(log: pd.DataFrame, key: str) -> float:
    """A run's last value; for the relative step the mean, as the last rate is low."""
    values = curve(log, key)
    return values.mean() if key == "norm/relative_step" else values.iloc[-1:].mean()


@cache
def parameters(shape: Flavor, vocab_size: int) -> int:
    """Parameters of the whole model, without gammas."""
    with torch.device("meta"):
        model = Llama2(Llama2Args(**asdict(shape) | {"vocab_size": vocab_size, "max_seq_len": 2}))
    return sum(parameter.numel() for parameter in model.parameters())


def read_experiments(folder: Path) -> list[Experiment]:
    """The experiments of `folder`/runs.jsonl. Runs that its plan shares come first, so the reference may be among them.

    Raises:
        UserError: two runs of one arm and rate have other settings, or with one seed other validation losses.
    """
    file = folder / "runs.jsonl"
    plan = read_preregistration(folder)
    groups = _by_kind(file)
    for shared in map(_by_kind, (folder / path for path in reversed(plan.shared_runs))):
        for (_, *other), runs in shared.items():
            for study, *kind in groups:
                if kind == other:
                    groups[study, *kind] = runs + groups[study, *kind]
    studies = [study for study, *_ in groups]
    experiments: list[Experiment] = []
    for (study, *_, steps), group in groups.items():
        config = group[0][1]
        flavor, optimizer = config.model.flavor, config.optimizer.name
        name = study if studies.count(study) == 1 else f"{study}: {flavor}, {optimizer}, {steps:,} steps"
        if name in [one.name for one in experiments]:
            name += f" ({config.model.vocab_size:,} entries, {config.data.validation_sequences:,} sequences of {config.training.seq_len})"
        arms = _arms(group)
        _require_same_settings(group, arms)
        runs = pd.DataFrame(map(_run, *zip(*group, strict=True), arms))
        same = runs.groupby(["arm", "rate", "seed"], sort=False)
        unlike = runs.arm[same.loss.transform("nunique") > 1]
        if len(unlike):
            raise UserError(
                f"{file}: a second run of {unlike.iloc[0]} with the same learning rate and seed has a different "
                "validation loss; collect them as two studies"
            )
        # the newest line of a repeated run, which may have more quantities
        chosen = [_chosen(rows, plan) for _, rows in same.tail(1).groupby("arm", sort=False)]
        experiments.append(Experiment(study, name, config, pd.concat(chosen, ignore_index=True)))
    return experiments


def digest(folder: Path) -> str:
    """Checksum of all files from which the tables and figures of `folder` are made."""
    shared = [folder / path for path in read_preregistration(folder).shared_runs]
    files = filter(look.is_file, [folder / "runs.jsonl", folder / "plan.toml", *shared])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _by_kind(file: Path) -> dict[tuple, list[tuple[dict, Config]]]:
    """The runs of a runs.jsonl by study, model, validation sequences, optimizer (unless variants name it) and steps."""
    groups: dict[tuple, list[tuple[dict, Config]]] = {}
    for line in record.parse(file.read_bytes(), file, dict[str, Any]):
        config = Config.model_validate(line["resolved"], extra="ignore")  # written by any version
        optimizer = "" if line.get("variant") else config.optimizer.name
        sequences = config.model.vocab_size, config.training.seq_len, config.data.validation_sequences
        kind = shape_of(config.model), *sequences, optimizer, config.training.steps
        groups.setdefault((line["study"], *kind), []).append((line, config))
    return groups


def _run(line: dict, config: Config, arm: str) -> dict:
    log = pd.DataFrame(line["log"] or {"tokens": []}).set_index("tokens")  # empty: diverged before a validation
    return {
        "arm": arm,
        "rate": _rate(config),
        "seed": config.debug.seed,
        "loss": final_loss(line),
        "log": log,
    }


def _arms(runs: Sequence[tuple[dict, Config]]) -> list[str]:
    """The name of each run's arm: its variant if there are several; otherwise PC on or off and the settings in which the
    runs differ, after the config's name if there are several configs.

    Runs of one config with the same values belong to one arm, named after the first: another sweep may list the same run,
    or leave a value at its default.
    """
    files = list(dict.fromkeys(line["config"] for line, _ in runs))
    names = dict(zip(files, unique_names([Path(name).with_suffix("") for name in files]), strict=True))
    settings = [{"pc.enable": config.pc.enable} | line["settings"] for line, config in runs]
    keys = {key for one in settings for key in one} - RATES
    varied = {key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)} | {"pc.enable"}
    arms = [label({key: value for key, value in one.items() if key in varied}) for one in settings]
    variants = [line.get("variant", "") for line, _ in runs]
    if all(variants) and len(set(variants)) > 1:
        arms = variants
    elif len(files) > 1:
        arms = [f"{names[line['config']]}, {arm}" for (line, _), arm in zip(runs, arms, strict=True)]
    same = [(line["config"], json.dumps(_values(line, config, keys))) for line, config in runs]
    first = dict(zip(reversed(same), reversed(arms), strict=True))
    return [first[one] for one in same]


def _require_same_settings(runs: Sequence[tuple[dict, Config]], arms: Sequence[str]) -> None:
    """Raise a `UserError` if runs of one arm and rate differ in more than their seed: a variant's name does not say so."""
    firsts: dict[tuple[str, float], dict[str, Any]] = {}
    for (line, config), arm in zip(runs, arms, strict=True):
        data = line["environment"].get("data") or {}  # checksums: a folder may have another name elsewhere
        values = settings_key(config) | data | {"debug.seed": 0, "data.seed": 0}
        first = firsts.setdefault((arm, _rate(config)), values)
        for key in differing_keys(first, values):
            raise UserError(
                f"runs of {arm} at one learning rate differ: {key} is {first.get(key)} and {values.get(key)}; collect them as "
                "two studies"
            )


def _rate(config: Config) -> float:
    return KINDS[config.optimizer.name].lr(config.optimizer)


def _values(line: dict, config: Config, keys: set[str]) -> dict[str, Any]:
    """The values that define a run's arm; without PC, no setting of PC counts. An old run may have set a key that is gone."""
    values = line["settings"] | all_values(config)
    if not config.pc.enable:
        keys = {key for key in keys if not key.startswith("pc.")} | {"pc.enable"}
    return {key: values.get(key) for key in sorted(keys)}


def _chosen(arm: pd.DataFrame, plan: Preregistration) -> pd.DataFrame:
    """The arm's runs by rate, with `best` and `chose`. The lowest mean over the tuning seeds chooses; if no rate has all of
    them, the first seed that ran at the most rates does."""
    losses = arm.pivot(index="rate", columns="seed", values="loss")
    seeds = [seed for seed in plan.tuning_seeds if seed in losses]
    if losses[seeds].dropna().empty:
        seeds = [losses.count().idxmax()]
    best = losses[seeds].mean(axis=1, skipna=False).idxmin()
    chose = arm.seed.isin(seeds) & (len(losses) > 1)  # even if the plan tests it
    if plan.test_seeds:
        chose |= ~arm.seed.isin(plan.test_seeds)
    arm = arm.assign(best=arm.rate == best, chose=chose)
    return arm.sort_values(["rate", "chose", "seed"], ascending=[True, False, True])

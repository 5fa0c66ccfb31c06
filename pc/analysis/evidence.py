"""Compare the arms of sweeps with their noise, each arm at its own best learning rate, differences by seed.

An *arm* is one combination of a sweep's settings without the learning rate; the first arm is the reference. An arm's
rate is the one with the lowest final validation loss on the first seed. If other seeds were run at that rate, only they
are used, so that no figure is one by which the rate was chosen. A *study* is a set of arms that belong together.

An experiment's folder has `runs.jsonl`, one line per run with its config, environment and log, and what `report` makes
from it: `tables.md` and a figure for each study.
"""

import json
import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pc.analysis.bars import read_results
from pc.analysis.curves import VALIDATION, compare
from pc.common import markdown
from pc.common.files import write_atomically
from pc.common.plots import label_tokens, save, short_tokens, subplots
from pc.common.run_folder import RunLog, read_log, unique_names
from pc.errors import UserError
from pc.sweep.spec import label, value_label

RATE = "optimizer.lr"
TORCHTITANS_RATE = 8e-4  # its default
CONDITION = ("spectra/gmcn/pc", "spectra/gmcn/qkv", "spectra/gmcn/all")
ESTIMATE_ERROR = "spectra/estimate_error/"
RMS = ("signal/attention/rms/", "signal/ffn/rms/")
NOTES = (
    "Losses in nats per token. ± is the standard error of the mean over seeds; differences and times fewer tokens are "
    "computed per seed. The learning rate of an arm was chosen on its first seed, which the line of a figure's left "
    "plot shows; the results are those of the other seeds, if there are any. A run whose final loss is not a number "
    "diverged: it counts as infinite, and the plots leave it out.\n"
)


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
    log = [line for line in steps.values() if line.keys() - {"step", "tokens"}]
    if not any(VALIDATION in line for line in log):
        return None
    return {
        "study": study,
        **{key: result.get(key) for key in ("name", "config", "settings", "state", "spikes")},
        "resolved": tomllib.loads((folder / "config.toml").read_text()),
        "environment": json.loads((folder / "environment.json").read_text()),
        "log": log,
    }


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


def read_studies(folder: Path) -> dict[str, list[Arm]]:
    """{study: its arms in the order of their first runs}.

    If a study has several configs, the config is part of an arm's name.

    Raises:
        UserError: no runs.jsonl; or two runs of one arm, rate and seed have different validation losses.
    """
    file = folder / "runs.jsonl"
    if not file.is_file():
        raise UserError(f"{file}: no such file; `evidence.py collect` writes it")
    studies: dict[str, list[dict]] = {}
    for line in _read(file):
        studies.setdefault(line["study"], []).append(line)
    return {study: _arms(lines, file) for study, lines in studies.items()}


def _arms(lines: Sequence[dict], file: Path) -> list[Arm]:
    configs = list(dict.fromkeys(line["config"] for line in lines))
    names = dict(zip(configs, unique_names([Path(config).with_suffix("") for config in configs]), strict=True))
    arms: dict[str, Arm] = {}
    for line in lines:
        settings = {key: value for key, value in line["settings"].items() if key != RATE}
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


# --- tables -----------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> str:
    """Mean, standard error of the mean (for at least two values) and n, as text for a table.

    Values that are not finite are said to have diverged; they count in the mean and in n.
    """
    mean = sum(values) / len(values)
    diverged = sum(not math.isfinite(value) for value in values)
    if diverged:
        return f"{mean:.4f} (n = {len(values)}, {diverged} diverged)"
    if len(values) < 2:
        return f"{mean:.4f} (n = 1)"
    return f"{mean:.4f} ± {statistics.stdev(values) / math.sqrt(len(values)):.4f} (n = {len(values)})"


def grid_table(arms: Sequence[Arm]) -> str:
    """Final validation loss by learning rate: of each arm's first seed, then of its other seeds; chosen rates in bold."""
    rates = sorted({rate for arm in arms for rate in arm.runs})
    if len(rates) < 2:
        return ""
    rows = [[value_label(rate), *(_grid_cell(arm, rate) for arm in arms)] for rate in rates]
    return markdown.table(["learning rate", *(arm.name for arm in arms)], rows)


def _grid_cell(arm: Arm, rate: float) -> str:
    if rate not in arm.runs:
        return "not run"
    texts = []
    for seed in arm.choosing & arm.runs[rate].keys():
        loss = arm.loss(rate, seed)
        text = f"{loss:.4f}" if math.isfinite(loss) else f"{loss} (diverged)"
        texts.append(f"**{text}**" if rate == arm.best_rate else text)
    others = [arm.loss(rate, seed) for seed in arm.runs[rate] if seed not in arm.choosing]
    if others:
        texts.append(mean_and_error(others))
    return "; ".join(texts)


def untuned(arms: Sequence[Arm]) -> str:
    """Warnings about arms whose best rate is the lowest or highest that was run, or the only one; "" if none."""
    tuned = [arm for arm in arms if len(arm.runs) > 1]
    if not tuned:
        return ""
    edge = "; ".join(arm.name for arm in tuned if arm.best_rate in (min(arm.runs), max(arm.runs)))
    one = "; ".join(arm.name for arm in arms if arm not in tuned)
    text = ""
    if edge:
        text += f"**Not tuned to the end:** a rate beyond those that were run may be better for {edge}.\n"
    if one:
        text += f"**Not tuned:** one rate only was run for {one}.\n"
    return text


def arm_table(arms: Sequence[Arm]) -> str:
    """Loss of each arm, difference by seed from the reference, speedup in tokens."""
    reference = arms[0]
    best = reference.best_rate
    rows = [[reference.name, value_label(best), mean_and_error(reference.losses(best)), "", "", ""]]
    for arm, rate, its_rate in comparisons(arms):
        seeds = paired_seeds(arm, rate, reference, its_rate)
        differences = [arm.loss(rate, seed) - reference.loss(its_rate, seed) for seed in seeds]
        runs = [compare([reference.runs[its_rate][seed], arm.runs[rate][seed]])[1] for seed in seeds]
        known = [run.speedup for run in runs if run.speedup is not None]
        speedup = f"{statistics.fmean(known):.2f}" if known and all(map(math.isfinite, differences)) else "-"
        difference = mean_and_error(differences) if seeds else "no common seed"
        if seeds and set(seeds) <= arm.choosing | reference.choosing:
            difference += ", on the choosing seed"
        losses = mean_and_error(arm.losses(rate))
        rows.append([arm.name, value_label(rate), losses, value_label(its_rate), difference, speedup])
    header = ["arm", "learning rate", "final validation loss", f"learning rate of {reference.name}"]
    return markdown.table([*header, "difference", "times fewer tokens"], rows)


def course_table(arms: Sequence[Arm]) -> str:
    """The mean differences of arm_table at up to ten points of the training; "" if there is only one.

    The points are the reference's validations. Where only some seeds of a pair were validated, the mean is theirs and
    their number stands in brackets.
    """
    reference = arms[0]
    runs = [reference.runs[reference.best_rate][seed] for seed in reference.judged(reference.best_rate)]
    points = max((run.series(VALIDATION).tokens for run in runs), key=len)[1:]
    every = math.ceil(len(points) / 10)
    points = [tokens for place, tokens in enumerate(points, 1) if (len(points) - place) % max(1, every) == 0]
    rows = []
    for arm, rate, its_rate in comparisons(arms):
        seeds = paired_seeds(arm, rate, reference, its_rate)
        cells = []
        for tokens in points:
            pairs = [
                (_loss_at(arm.runs[rate][s], tokens), _loss_at(reference.runs[its_rate][s], tokens)) for s in seeds
            ]
            cells.append(_mean_difference([pair for pair in pairs if None not in pair], len(seeds)))
        if set(cells) - {"-"}:
            rows.append([arm.name, f"{value_label(rate)} / {value_label(its_rate)}", str(len(seeds)), *cells])
    return (
        markdown.table(["difference after tokens", "learning rates", "n", *map(short_tokens, points)], rows)
        if rows
        else ""
    )


def _loss_at(run: RunLog, tokens: int) -> float | None:
    """Validation loss after `tokens`: NaN if the run had diverged by then, None if it was not validated there."""
    series = run.series(VALIDATION)
    if tokens in series.tokens:
        return series.values[series.tokens.index(tokens)]
    return math.nan if tokens > series.tokens[-1] and math.isnan(series.values[-1]) else None


def _mean_difference(pairs: Sequence[tuple[float, float]], seeds: int) -> str:
    if not pairs:
        return "-"
    mean = statistics.fmean(one - other for one, other in pairs)
    text = f"{mean:+.3f}" if math.isfinite(mean) else "diverged"
    return text if len(pairs) == seeds else f"{text} ({len(pairs)})"


def conditioning_table(arms: Sequence[Arm]) -> str:
    """Final geometric mean of the modified condition numbers, first and last error of the estimate, largest RMS.

    Of each arm at its best rate, then, on the first seed, of the arms with several rates at the rates that all these
    have run.
    """
    chosen = [(arm, arm.best_rate, arm.judged(arm.best_rate)) for arm in arms]
    tuned = [arm for arm in arms if len(arm.runs) > 1]
    common = set.intersection(*(set(arm.runs) for arm in tuned)) if len(tuned) > 1 else set()
    chosen += [(arm, rate, [arm.first_seed]) for rate in sorted(common) for arm in tuned]
    rows = []
    for arm, rate, seeds in chosen:
        runs = [arm.runs[rate][seed] for seed in seeds]
        conditions = [_text([last for run in runs for last in run.series(key).values[-1:]], ".1f") for key in CONDITION]
        errors = [run.series(key).values for run in runs for key in run.keys() if _is_largest_error(key)]
        first_and_last = [_text(values, ".1e", max) for values in ([e[0] for e in errors], [e[-1] for e in errors])]
        sizes = [_text([v for run in runs for v in run.series(key + "max").values], ".2g", max) for key in RMS]
        words = [arm.name, value_label(rate), ", ".join(map(str, seeds)), *conditions]
        rows.append([*words, " / ".join(first_and_last), " / ".join(sizes)])
    words = "arm|learning rate|seeds|GMCN of PC blocks|of q, k, v|of all|largest error of the estimate, first / last"
    return markdown.table([*words.split("|"), "largest RMS of a layer's outputs, attention / FFN"], rows)


def _is_largest_error(key: str) -> bool:
    return key.startswith(ESTIMATE_ERROR) and key.endswith("max")


def _text(values: Sequence[float], form: str, of=statistics.fmean) -> str:
    return format(of(values), form) if values else "-"


# --- report -----------------------------------------------------------------------------------------


def plot(arms: Sequence[Arm], path: Path) -> Path:
    """Final loss against learning rate, and validation loss against tokens at each arm's best rate."""
    figure, (left, right) = subplots(1, 2, width=4.2, height=3.8)
    for i, arm in enumerate(arms):
        rates = sorted(arm.runs)
        left.plot(rates, [arm.loss(rate, arm.first_seed) for rate in rates], color=f"C{i}", linewidth=1)
        for rate in rates:
            left.plot([rate] * len(arm.runs[rate]), [arm.loss(rate, s) for s in arm.runs[rate]], ".", color=f"C{i}")
        label = f"{arm.name}, {value_label(arm.best_rate)}"
        for seed in arm.judged(arm.best_rate):
            series = arm.runs[arm.best_rate][seed].series(VALIDATION)
            late = sum(tokens < series.tokens[-1] / 5 for tokens in series.tokens)  # the start would hide the rest
            right.plot(series.tokens[late:], series.values[late:], color=f"C{i}", linewidth=1, label=label)
            label = None  # one line of the legend per arm
    rates = sorted({rate for arm in arms for rate in arm.runs})
    left.set_xscale("log")
    left.set_xticks(rates, [value_label(rate) for rate in rates], rotation=45)
    left.minorticks_off()
    left.set_xlabel("peak learning rate")
    left.set_ylabel("final validation loss (nats)")
    label_tokens(right)
    right.set_ylabel("validation loss (nats)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    return save(figure, path)


def report(folder: Path) -> list[Path]:
    """Write tables.md and a figure for each study, from `folder`/runs.jsonl."""
    text, written = "", [folder / "tables.md"]
    for study, arms in read_studies(folder).items():
        tables = [grid_table(arms), untuned(arms), arm_table(arms), course_table(arms), conditioning_table(arms)]
        text += "\n".join([f"## {study}\n", *filter(None, tables), ""])
        written.append(plot(arms, folder / study))
    write_atomically(written[0], text + NOTES)
    return written

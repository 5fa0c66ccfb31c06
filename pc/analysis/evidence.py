"""Compare the arms of sweeps with their noise, each arm at its own best learning rate, differences by seed.

An *arm* is one combination of a sweep's settings without the learning rate; the first arm is the reference. An arm's
rate is the one with the lowest final validation loss on the first seed. If other seeds were run at that rate, only they
are used, so that no figure is one by which the rate was chosen.
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
from pc.common.run_folder import METRICS, RunLog, read_log, unique_names
from pc.errors import UserError
from pc.sweep.spec import label, value_label

RATE = "optimizer.lr"
KEPT = (VALIDATION, "spectra/gmcn/pc", "spectra/gmcn/qkv", "spectra/gmcn/all")
ESTIMATE_ERROR = "spectra/estimate_error/"
RMS = ("signal/attention/rms/", "signal/ffn/rms/")


def collect(sweep: Path, output: Path) -> int:
    """Copy the data for tables and figures of a sweep's finished and diverged runs to `output`; returns the number of runs.

    From metrics.jsonl it keeps the lines with a validation loss, condition numbers or RMS of outputs, and of these the
    losses, condition numbers, errors of the estimate, and the largest RMS over the layers.
    """
    found = _validated(sweep)
    for result, run in found:
        source, destination = run.file.parent, output / result["name"]
        lines = [thin for line in run.lines if (thin := _thin(line)).keys() - {"step", "tokens"}]
        write_atomically(destination / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
        write_atomically(destination / "config.toml", (source / "config.toml").read_text())
        write_atomically(output / "environment.json", (source / "environment.json").read_text())
    kept = [{key: value for key, value in result.items() if key != "folder"} for result, _ in found]
    write_atomically(output / "results.jsonl", "".join(json.dumps(result) + "\n" for result in kept))
    return len(found)


def _validated(sweep: Path) -> list[tuple[dict, RunLog]]:
    """The results of runs that were validated, with their logs. A run that diverged ends with a loss of NaN."""
    found = [(result, read_log(_folder(sweep, result))) for result in read_results(sweep)]
    for result, run in found:
        if result.get("state") == "diverged":
            run.lines.append({key: run.lines[-1][key] for key in ("step", "tokens")} | {VALIDATION: None})
    found = [(result, run) for result, run in found if run.series(VALIDATION).steps]
    if not found:
        raise UserError(f"{sweep / 'results.jsonl'}: no finished run with a {VALIDATION}")
    return found


def _folder(sweep: Path, result: dict) -> Path:
    """A run's folder in this sweep's folder, which may be a copy; where it was trained if it is not there."""
    here = sweep / result["name"]
    return here if here.is_dir() else Path(result.get("folder", here))


def _thin(line: dict) -> dict:
    kept = {key: line[key] for key in line if key in ("step", "tokens", *KEPT) or key.startswith(ESTIMATE_ERROR)}
    for prefix in RMS:
        values = [value for key, value in line.items() if key.startswith(prefix) and value is not None]
        if values:
            kept[prefix + "max"] = max(values)
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in kept.items()}


@dataclass
class Arm:
    """Runs that differ only in learning rate and seed."""

    name: str
    runs: dict[float | None, dict[int | None, RunLog]] = field(default_factory=dict)
    """{learning rate: {seed: run}}; the rate is None if neither the sweep nor the config sets it"""

    def loss(self, rate: float | None, seed: int | None) -> float:
        """Final validation loss in nats per token; NaN counts as infinite, so that it is never the best."""
        value = self.runs[rate][seed].series(VALIDATION).values[-1]
        return value if math.isfinite(value) else math.inf

    @property
    def first_seed(self) -> int | None:
        """The first seed that ran at every rate; it chooses the rate."""
        common = set.intersection(*(set(runs) for runs in self.runs.values()))
        if not common:
            raise UserError(f"{self.name}: no seed has run at every learning rate")
        return min(common, key=lambda seed: -1 if seed is None else seed)

    @property
    def choosing(self) -> set[int | None]:
        """The seed by which the rate was chosen; empty if there is only one rate."""
        return {self.first_seed} if len(self.runs) > 1 else set()

    @property
    def best_rate(self) -> float | None:
        """The rate with the lowest loss on the first seed."""
        return min(self.runs, key=lambda rate: self.loss(rate, self.first_seed))

    def judged(self, rate: float | None) -> dict[int | None, RunLog]:
        """The runs at `rate` without the seed that chose it, or only that seed's if there is no other, by seed."""
        runs = dict(sorted(self.runs[rate].items(), key=lambda item: -1 if item[0] is None else item[0]))
        return {seed: run for seed, run in runs.items() if seed not in self.choosing} or runs


def read_arms(folders: Sequence[Path]) -> list[Arm]:
    """The arms of one or more collected sweeps, in the order of their first runs.

    If the sweeps together have several configs, the config is part of an arm's name.

    Raises:
        UserError: two runs of one arm, learning rate and seed have different validation losses.
    """
    found = [pair for folder in folders for pair in _validated(folder)]
    configs = list(dict.fromkeys(result["config"] for result, _ in found))
    names = dict(zip(configs, unique_names([Path(config).with_suffix("") for config in configs]), strict=True))
    arms: dict[str, Arm] = {}
    for result, run in found:
        settings = {key: value for key, value in result["settings"].items() if key != RATE}
        words = [names[result["config"]]] if len(configs) > 1 or not settings else []
        name = ", ".join(words + ([label(settings)] if settings else []))
        rate = result["settings"].get(RATE, _own_rate(run))
        runs = arms.setdefault(name, Arm(name)).runs.setdefault(rate, {})
        other = runs.setdefault(result["seed"], run)
        if str(other.series(VALIDATION)) != str(run.series(VALIDATION)):  # as text, because NaN is not equal to itself
            raise UserError(
                f"{other.file.parent} and {run.file.parent}: two runs of {name} with the same learning rate and seed "
                "but different validation losses; report them separately"
            )
    return list(arms.values())


def _own_rate(run: RunLog) -> float | None:
    """The learning rate in a run's config.toml; None if it is not set there."""
    config = tomllib.loads((run.file.parent / "config.toml").read_text())
    return config.get("optimizer", {}).get("lr")


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
    rates = sorted({rate for arm in arms for rate in arm.runs if rate is not None})
    if len(rates) < 2:
        return ""
    rows = []
    for rate in rates:
        cells = []
        for arm in arms:
            first = [_loss_text(arm.loss(rate, seed)) for seed in arm.choosing if rate in arm.runs]
            others = [arm.loss(rate, seed) for seed in arm.runs.get(rate, {}) if seed not in arm.choosing]
            texts = [f"**{text}**" if rate == arm.best_rate else text for text in first]
            texts += [mean_and_error(others)] if others else []
            cells.append("; ".join(texts) or "not run")
        rows.append([value_label(rate), *cells])
    return markdown.table(["learning rate", *(arm.name for arm in arms)], rows)


def _loss_text(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else f"{loss} (diverged)"


def untuned(arms: Sequence[Arm]) -> str:
    """Warnings about arms whose best rate is the lowest or highest that was run, or the only one; "" if none."""
    if not _chosen(*arms):
        return ""
    edge = [arm.name for arm in arms if len(arm.runs) > 1 and arm.best_rate in (min(arm.runs), max(arm.runs))]
    one = [arm.name for arm in arms if len(arm.runs) == 1]
    text = f"**Not tuned to the end:** a rate beyond those that were run may be better for {'; '.join(edge)}.\n"
    return text * bool(edge) + f"**Not tuned:** one rate only was run for {'; '.join(one)}.\n" * bool(one)


def paired_seeds(arm: Arm, rate: float | None, reference: Arm, its_rate: float | None) -> list[int | None]:
    """Seeds run in both arms at these rates, without the one that chose the rates if there are others."""
    common = sorted(arm.runs[rate].keys() & reference.runs[its_rate].keys(), key=str)
    return [seed for seed in common if seed not in arm.choosing | reference.choosing] or common


def _chosen(*arms: Arm) -> bool:
    """Whether any arm has several rates to choose from."""
    return any(len(arm.runs) > 1 for arm in arms)


def comparisons(arms: Sequence[Arm]) -> Iterator[tuple[Arm, float | None, float | None]]:
    """(arm, its learning rate, the reference's) of what is compared with the reference.

    Both at their best rates, then both at the reference's, then the arm at its own against other rates of the reference
    with several common seeds.
    """
    reference = arms[0]
    best = reference.best_rate
    for arm in arms[1:]:
        pairs = [(arm.best_rate, best)] + [(best, best)] * (best in arm.runs)
        pairs += [
            (arm.best_rate, rate)
            for rate in reference.runs
            if len(paired_seeds(arm, arm.best_rate, reference, rate)) > 1
        ]
        yield from ((arm, *pair) for pair in dict.fromkeys(pairs))


def arm_table(arms: Sequence[Arm]) -> str:
    """Loss of each arm, difference by seed from the reference, speedup in tokens."""
    reference = arms[0]
    rate = reference.best_rate
    rows = [[reference.name, _as_text(rate), mean_and_error(_losses(reference, rate)), "", "", ""]]
    for arm, rate, its_rate in comparisons(arms):
        seeds = paired_seeds(arm, rate, reference, its_rate)
        runs = [compare([reference.runs[its_rate][seed], arm.runs[rate][seed]])[1] for seed in seeds]
        difference, speedup = "no common seed", "-"
        if runs:
            differences = [arm.loss(rate, seed) - reference.loss(its_rate, seed) for seed in seeds]
            difference = mean_and_error(differences)
            known = [run.speedup for run in runs if run.speedup is not None]
            speedup = f"{statistics.fmean(known):.2f}" if known and all(map(math.isfinite, differences)) else "-"
        if seeds and set(seeds) <= arm.choosing | reference.choosing:
            difference += ", on the choosing seed"
        losses = mean_and_error(_losses(arm, rate))
        rows.append([arm.name, _as_text(rate), losses, _as_text(its_rate), difference, speedup])
    header = ["arm", "learning rate", "final validation loss", f"learning rate of {reference.name}"]
    return markdown.table([*header, "difference", "times fewer tokens"], rows)


def course_table(arms: Sequence[Arm]) -> str:
    """The mean differences of arm_table at up to ten points of the training; "" if none was validated at equal steps."""
    reference = arms[0]
    tokens = next(iter(reference.judged(reference.best_rate).values())).series(VALIDATION).tokens
    shown = range(len(tokens) - 1, 0, -max(1, math.ceil((len(tokens) - 1) / 10)))[::-1]
    rows = []
    for arm, rate, its_rate in comparisons(arms):
        seeds = paired_seeds(arm, rate, reference, its_rate)
        pairs = [[one.series(VALIDATION) for one in (arm.runs[rate][s], reference.runs[its_rate][s])] for s in seeds]
        if pairs and shown and all(series.tokens == tokens for pair in pairs for series in pair):
            means = [statistics.fmean(one.values[k] - other.values[k] for one, other in pairs) for k in shown]
            rates = f"{_as_text(rate)} / {_as_text(its_rate)}"
            rows.append([arm.name, rates, str(len(seeds)), *map(_difference_text, means)])
    header = ["difference after tokens", "learning rates", "n", *(short_tokens(tokens[k]) for k in shown)]
    return markdown.table(header, rows) if rows else ""


def _difference_text(difference: float) -> str:
    return f"{difference:+.3f}" if math.isfinite(difference) else "diverged"


def _as_text(rate: float | None) -> str:
    return "as configured" if rate is None else value_label(rate)


def _losses(arm: Arm, rate: float | None) -> list[float]:
    return [arm.loss(rate, seed) for seed in arm.judged(rate)]


def conditioning_table(arms: Sequence[Arm]) -> str:
    """Final geometric mean of the modified condition numbers, first and last error of the estimate, largest RMS.

    Of each arm at its best rate, then, on the first seed, of the arms with several rates at the rates that all these
    have run.
    """
    chosen = [(arm, arm.best_rate, list(arm.judged(arm.best_rate))) for arm in arms]
    tuned = [arm for arm in arms if len(arm.runs) > 1]
    common = set.intersection(*(set(arm.runs) for arm in tuned)) if len(tuned) > 1 else set()
    chosen += [(arm, rate, [arm.first_seed]) for rate in sorted(common) for arm in tuned]
    rows = []
    for arm, rate, seeds in chosen:
        runs = [arm.runs[rate][seed] for seed in seeds]
        cells = []
        for key in KEPT[1:]:
            values = [run.series(key).values[-1] for run in runs if run.series(key).steps]
            cells.append(f"{statistics.fmean(values):.1f}" if values else "-")
        errors = " / ".join(_estimate_error(runs, place) for place in (0, -1))
        sizes = [max((v for run in runs for v in run.series(prefix + "max").values), default=None) for prefix in RMS]
        rms = " / ".join("-" if size is None else f"{size:.2g}" for size in sizes)
        rows.append([arm.name, _as_text(rate), ", ".join(map(str, seeds)), *cells, errors, rms])
    words = "arm|learning rate|seeds|GMCN of PC blocks|of q, k, v|of all|largest error of the estimate, first / last"
    return markdown.table([*words.split("|"), "largest RMS of a layer's outputs, attention / FFN"], rows)


def _estimate_error(runs: Sequence[RunLog], place: int) -> str:
    """Largest relative error of the spectral-norm estimate over blocks and runs, first or last logged."""
    series = [run.series(key) for run in runs for key in run.keys() if key.startswith(ESTIMATE_ERROR) and "max" in key]
    return f"{max(one.values[place] for one in series):.1e}" if series else "-"


def plot(arms: Sequence[Arm], path: Path) -> Path:
    """Final loss against learning rate, and validation loss against tokens at each arm's best rate."""
    figure, (left, right) = subplots(1, 2, width=4.2, height=3.8)
    for i, arm in enumerate(arms):
        rates = sorted(rate for rate in arm.runs if rate is not None)
        chosen_by = [arm.loss(rate, arm.first_seed) for rate in rates]
        left.plot(rates, chosen_by, color=f"C{i}", linewidth=1)
        for rate in rates:
            left.plot([rate] * len(arm.runs[rate]), [arm.loss(rate, s) for s in arm.runs[rate]], ".", color=f"C{i}")
        chosen = value_label(arm.best_rate) if arm.best_rate else ""
        for number, run in enumerate(arm.judged(arm.best_rate).values()):
            series = run.series(VALIDATION)
            late = [k for k, tokens in enumerate(series.tokens) if tokens >= series.tokens[-1] / 5]
            right.plot(
                [series.tokens[k] for k in late],
                [series.values[k] for k in late],
                color=f"C{i}",
                linewidth=1,
                label=", ".join(filter(None, (arm.name, chosen))) if number == 0 else None,
            )
    rates = sorted({rate for arm in arms for rate in arm.runs if rate is not None})
    if rates:
        left.set_xscale("log")
        left.set_xticks(rates, [value_label(rate) for rate in rates], rotation=45)
        left.minorticks_off()
    left.set_xlabel("peak learning rate")
    left.set_ylabel("final validation loss (nats)")
    label_tokens(right)
    right.set_ylabel("validation loss (nats)")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    return save(figure, path)


def report(folders: Sequence[Path], output: Path) -> list[Path]:
    """tables.md and figure.png in `output`, from collected sweeps whose arms belong together."""
    arms = read_arms(folders)
    parts = [grid_table(arms), untuned(arms), arm_table(arms), course_table(arms), conditioning_table(arms)]
    words = (
        "Losses in nats per token. ± is the standard error of the mean over seeds; differences and times fewer "
        "tokens are computed per seed. The learning rate of an arm was chosen on its first seed, which the line of the "
        "left plot shows; the results are those of the other seeds, if there are any. The first table has both.\n"
    )
    if any(math.isinf(arm.loss(rate, seed)) for arm in arms for rate, runs in arm.runs.items() for seed in runs):
        words += "A run whose final loss is not a number diverged: it counts as infinite, and the plot leaves it out.\n"
    write_atomically(output / "tables.md", "\n".join([*filter(None, parts), words]))
    return [output / "tables.md", plot(arms, output / "figure")]

"""Tables and figures of the runs that `pc.analysis.evidence` collects."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from pc.analysis.curves import VALIDATION, compare
from pc.analysis.evidence import (
    CONDITION,
    ESTIMATE_ERROR,
    RMS,
    Arm,
    Experiment,
    comparisons,
    interval,
    paired_seeds,
    read_experiments,
    slope,
    verdict,
)
from pc.common import markdown
from pc.common.files import write_atomically
from pc.common.plots import save, short_tokens, subplots
from pc.common.run_folder import RunLog
from pc.sweep.spec import value_label

NOTES = """
Losses in nats per token. ± is the standard error of the mean over seeds; differences and times fewer tokens are computed
per seed. The learning rate of an arm was chosen on its first seed, which the line of a figure's left plot shows; the
results are those of the other seeds, if there are any. Verdict, by the 95 % interval of the mean difference (Student's
t): *better* or *worse* if it does not contain 0; *no difference* if it does and reaches less than {margin} to each side
of the mean; else *undecided*. A run whose final loss is not a number diverged: it counts as infinite, and the plots leave
it out.
"""


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


def arm_table(arms: Sequence[Arm], margin: float) -> str:
    """Loss of each arm; difference by seed from the reference, with interval and verdict; speedup in tokens."""
    reference = arms[0]
    best = reference.best_rate
    rows = [[reference.name, value_label(best), mean_and_error(reference.losses(best)), *[""] * 5]]
    for arm, rate, its_rate in comparisons(arms):
        seeds = paired_seeds(arm, rate, reference, its_rate)
        differences = [arm.loss(rate, seed) - reference.loss(its_rate, seed) for seed in seeds]
        runs = [compare([reference.runs[its_rate][seed], arm.runs[rate][seed]])[1] for seed in seeds]
        known = [run.speedup for run in runs if run.speedup is not None]
        speedup = f"{statistics.fmean(known):.2f}" if known and all(map(math.isfinite, differences)) else "-"
        difference = mean_and_error(differences) if seeds else "no common seed"
        tested = differences
        if seeds and set(seeds) <= arm.choosing | reference.choosing:
            difference += ", on the choosing seed"
            tested = []
        said = [_with_interval(tested), verdict(tested, margin)]
        losses = mean_and_error(arm.losses(rate))
        rows.append([arm.name, value_label(rate), losses, value_label(its_rate), difference, speedup, *said])
    header = ["arm", "learning rate", "final validation loss", f"learning rate of {reference.name}"]
    return markdown.table([*header, "difference", "times fewer tokens", "95 % interval", "verdict"], rows)


def _with_interval(values: Sequence[float]) -> str:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return "-"
    mean, half = interval(values)
    return f"{mean - half:+.4f} to {mean + half:+.4f}"


def regime_table(experiments: Sequence[Experiment]) -> str:
    """The regime of each experiment: that of its reference at its best rate, on its first seed."""
    header = "experiment|parameters|tokens per parameter|steps|warm-up|sum of rate x decay|std x sqrt(width)"
    rows = []
    for one in experiments:
        arm = one.arms[0]
        condition = arm.runs[arm.best_rate][arm.first_seed].series(CONDITION[0]).values
        rows.append(
            [one.name, f"{one.parameters:,}", f"{one.tokens_per_parameter:.3g}", f"{one.config['training']['steps']:,}"]
            + [f"{one.warm_up:.1%}", f"{one.rate_times_decay:.2f}", f"{one.std_times_root_width:.2f}"]
            + [f"{condition[0]:.1f} to {condition[-1]:.1f}" if condition else "-"]
        )
    return markdown.table([*header.split("|"), "condition number of the reference, start to end"], rows)


def size_table(experiments: Sequence[Experiment]) -> str:
    """How differences change with size at equal tokens per parameter, and the rule that carries rates up; "" if neither.

    A line is fitted to the differences of all seeds, each arm at its best rate, over the logarithm of the parameters;
    and one to the logarithm of the best rates of references that have worse rates on both sides.
    """
    differences: dict[tuple, list[tuple[float, float]]] = {}
    rates: dict[tuple, list[tuple[float, float]]] = {}
    for one in experiments:
        reference, size = one.arms[0], math.log2(one.parameters)
        kind = one.config["optimizer"]["name"], f"{one.tokens_per_parameter:.2g}"
        if min(reference.runs) < reference.best_rate < max(reference.runs):
            rates.setdefault(kind, []).append((size, math.log2(reference.best_rate)))
        for arm in one.arms[1:]:
            pair = (arm, arm.best_rate, reference, reference.best_rate)
            found = [arm.loss(pair[1], seed) - reference.loss(pair[3], seed) for seed in paired_seeds(*pair)]
            points = [(size, value) for value in found if math.isfinite(value)]
            differences.setdefault((*kind, arm.name), []).extend(points)
    rows = []
    for kind, points in differences.items():
        if (sizes := len({size for size, _ in points})) > 2:
            change, half = slope(points)
            rows.append([*kind, str(sizes), f"{change - half:+.4f} to {change + half:+.4f}"])
    header = "optimizer|tokens per parameter|arm|sizes|change of the difference when parameters double (95 %)"
    text = markdown.table(header.split("|"), rows) if rows else ""
    for (optimizer, ratio), points in rates.items():
        if len({size for size, _ in points}) > 1:
            size, rate = max(points)
            power = f"(N / {2**size:,.0f})^{slope(points)[0]:.2f}"
            text += f"\n{optimizer}, {ratio} tokens per parameter: best rates carried up: {2**rate:.4g} {power}.\n"
    return text


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


def plot(experiments: Sequence[Experiment], path: Path) -> Path:
    """A row for each experiment: final loss over rate; loss, difference and condition number over tokens per parameter."""
    figure, rows = subplots(len(experiments), 4, width=3.2, height=2.8, squeeze=False)
    for (grid, *courses), one in zip(rows, experiments, strict=True):
        _plot_grid(grid, one)
        for axes, name in zip(
            courses, ("validation loss (nats)", "difference (nats)", "condition number"), strict=True
        ):
            axes.set_xlabel("tokens per parameter")
            axes.set_ylabel(name)
        _plot_courses(courses, one)
        grid.set_title(one.name, fontsize=8, loc="left")
        courses[0].legend(fontsize=6)
    return save(figure, path)


def _plot_grid(axes, experiment: Experiment) -> None:
    for i, arm in enumerate(experiment.arms):
        rates = sorted(arm.runs)
        axes.plot(rates, [arm.loss(rate, arm.first_seed) for rate in rates], color=f"C{i}", linewidth=1)
        for rate in rates:
            axes.plot([rate] * len(arm.runs[rate]), [arm.loss(rate, s) for s in arm.runs[rate]], ".", color=f"C{i}")
    rates = sorted({rate for arm in experiment.arms for rate in arm.runs})
    axes.set_xscale("log")
    axes.set_xticks(rates, [value_label(rate) for rate in rates], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("final validation loss (nats)")


def _plot_courses(panels, experiment: Experiment) -> None:
    """Losses, differences and condition numbers of every seed, from a tenth of the tokens on: the start hides the rest."""
    losses, differences, conditions = panels
    last = experiment.tokens_per_parameter
    for i, arm in enumerate(experiment.arms):
        label = f"{arm.name}, {value_label(arm.best_rate)}"
        for seed in arm.judged(arm.best_rate):
            run = arm.runs[arm.best_rate][seed]
            for axes, key in ((losses, VALIDATION), (conditions, CONDITION[0])):
                points = _over_parameters(run, key, experiment)
                late = {x: y for x, y in points.items() if x > last / 10}
                axes.plot(list(late), list(late.values()), color=f"C{i}", linewidth=1, label=label)
            label = None  # one line of the legend per arm
    reference = experiment.arms[0]
    for arm, rate, its_rate in comparisons(experiment.arms):
        for seed in paired_seeds(arm, rate, reference, its_rate):
            ours = _over_parameters(arm.runs[rate][seed], VALIDATION, experiment)
            theirs = _over_parameters(reference.runs[its_rate][seed], VALIDATION, experiment)
            late = {x: y - theirs[x] for x, y in ours.items() if x in theirs and x > last / 10}
            style = "-" if (rate, its_rate) == (arm.best_rate, reference.best_rate) else ":"
            color = f"C{experiment.arms.index(arm)}"
            differences.plot(list(late), list(late.values()), style, color=color, linewidth=1)
    differences.axhline(0, color="black", linewidth=0.5)


def _over_parameters(run: RunLog, key: str, experiment: Experiment) -> dict[float, float]:
    """{tokens per parameter: value}"""
    series = run.series(key)
    return {t / experiment.parameters: value for t, value in zip(series.tokens, series.values, strict=True)}


def report(folder: Path, margin: float) -> list[Path]:
    """Write tables.md and a figure for each study, from `folder`/runs.jsonl."""
    studies: dict[str, list[Experiment]] = {}
    for experiment in read_experiments(folder):
        studies.setdefault(experiment.study, []).append(experiment)
    text, written = (
        regime_table([one for experiments in studies.values() for one in experiments]),
        [folder / "tables.md"],
    )
    for study, experiments in studies.items():
        for one in experiments:
            arms = one.arms
            tables = [grid_table(arms), untuned(arms), arm_table(arms, margin), course_table(arms)]
            text += "\n".join([f"\n## {one.name}\n", *filter(None, [*tables, conditioning_table(arms)]), ""])
        text += size_table(experiments)
        written.append(plot(experiments, folder / study))
    write_atomically(written[0], text + NOTES.format(margin=margin))
    return written

"""Tables and figures of the runs that `pc.analysis.evidence` collects."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from pc.analysis import curves
from pc.analysis.evidence import CONDITION, Arm, Experiment, pairs, read_experiments
from pc.common import markdown
from pc.common.files import write_atomically
from pc.common.plots import save, short_tokens, subplots
from pc.settings.models import FLAVORS
from pc.sweep.spec import VALIDATION, value_label

NOTES = """
Losses in nats per token. ± is the standard error of the mean over seeds; differences and times fewer tokens are computed
per seed. The learning rate of an arm, in bold, was chosen on its first seed; the results are those of the other seeds,
if there are any. Interval: 95 %, of the mean difference, by Student's t. Verdict: *better* or *worse* if it does not
contain 0; *no difference* if it does and reaches less than {margin} to each side of the mean; else *undecided*. "After"
n tokens are the differences then, with the number of seeds in brackets if not all were validated. A run whose final loss
is not a number diverged: it counts as infinite, and the plots leave it out.
"""

NO_TEST = "-", "no test"


def mean_and_error(values: pd.Series) -> str:
    """Mean, its standard error if there are two values or more, and how many diverged."""
    diverged = (~np.isfinite(values)).sum()
    if diverged:
        return f"{diverged} of {len(values)} diverged"
    return f"{values.mean():.4f}" + (f" ± {values.sem():.4f}" if len(values) > 1 else "")


def half_width(error: float, freedom: int) -> float:
    """Half the width of a 95 % interval by Student's t; infinite without a degree of freedom."""
    return stats.t.ppf(0.975, freedom) * error if freedom else math.inf


def interval_and_verdict(differences: pd.Series, margin: float) -> tuple[str, str]:
    """The 95 % interval of the mean, and what it says: better, worse, no difference (within ± `margin`), undecided."""
    if len(differences) < 2 or not np.isfinite(differences).all():
        return NO_TEST
    mean, half = differences.mean(), half_width(differences.sem(), len(differences) - 1)
    text = f"{mean - half:+.4f} to {mean + half:+.4f}"
    if abs(mean) > half:
        return text, "better" if mean < 0 else "worse"
    return text, "no difference" if half < margin else "undecided"


def regime_table(experiments: Sequence[Experiment]) -> str:
    """The regime of each experiment: that of its reference at its best rate, on its first seed."""
    header = "experiment|parameters|tokens per parameter|steps|warm-up|sum of rate x decay|std x sqrt(width)"
    rows = []
    for one in experiments:
        config, arm = one.config, one.arms[0]
        steps, warm_up = config.training.steps, config.lr_scheduler.warmup_steps / config.training.steps
        # the rate rises linearly in the warm-up and then falls along a curve that is symmetric about its middle
        mean = warm_up / 2 + (1 - warm_up) * (1 + config.lr_scheduler.min_lr_factor) / 2
        decay = arm.best_rate * config.optimizer.weight_decay * mean * steps
        std = config.model.init_std * math.sqrt(FLAVORS[config.model.flavor].dim)
        condition = arm.course(CONDITION[0], arm.best_rate, arm.first_seed)
        ends = "-" if condition.empty else f"{condition.iloc[0]:.1f} to {condition.iloc[-1]:.1f}"
        sizes = [f"{one.parameters:,}", f"{one.tokens_per_parameter:.3g}", f"{steps:,}"]
        rows.append([one.name, *sizes, f"{warm_up:.1%}", f"{decay:.2f}", f"{std:.2f}", ends])
    return markdown.table([*header.split("|"), "condition number of the reference, start to end"], rows)


def arm_table(arms: Sequence[Arm]) -> str:
    """Of each arm and rate, the seed that chose the rate and then the others: final losses, and condition numbers
    (geometric means)."""
    rows = []
    for arm in arms:
        for rate, losses in arm.losses.iterrows():
            losses, chosen = losses.dropna(), rate == arm.best_rate
            first = losses.index.isin(arm.choosing)
            for group in filter(len, (losses[first], losses[~first])):
                words = [arm.name, f"**{value_label(rate)}**" if chosen else value_label(rate)]
                ends = [
                    np.mean([arm.course(key, rate, seed).iloc[-1:].mean() for seed in group.index]) for key in CONDITION
                ]
                seeds = ", ".join(map(str, group.index))
                rows.append([*words, seeds, mean_and_error(group), *(_cell(end, ".1f") for end in ends)])
    header = "arm|learning rate|seeds|final validation loss|GMCN of PC blocks|of q, k, v|of all"
    return markdown.table(header.split("|"), rows)


def pair_table(arms: Sequence[Arm], margin: float) -> str:
    """Differences to the reference, by seed, at the end and at up to ten points of its training; "" without a pair."""
    reference, rate = arms[0], arms[0].best_rate
    courses = [reference.course(VALIDATION, rate, seed) for seed in reference.judged(rate).index]
    longest = max(courses, key=len)
    places = np.linspace(0, len(longest) - 1, min(len(longest), 11)).round().astype(int)[1:]
    points = longest.index[places]
    rows = []
    for pair in pairs(arms):
        differences = pair.differences
        seeds = ", ".join(map(str, differences.index)) + ("" if pair.is_test else " (chose a rate)")
        speedup = pd.Series(math.nan)
        if np.isfinite(differences).all():
            speedup = pd.Series([curves.speedup(*pair.both(seed)) for seed in differences.index])
        verdict = interval_and_verdict(differences, margin) if pair.is_test else NO_TEST
        said = [mean_and_error(differences), *verdict, _cell(speedup.mean(), ".2f")]
        for _, then in pair.courses.reindex(points).iterrows():
            count = f" ({then.count()})" if 0 < then.count() < len(then) else ""
            said.append(_cell(then.mean(), "+.3f") + count)
        rows.append([pair.arm.name, value_label(pair.rate), value_label(pair.its_rate), seeds, *said])
    header = ["arm", "learning rate", f"that of {reference.name}", "seeds", "difference", "interval", "verdict"]
    after = [f"after {short_tokens(tokens)}" for tokens in points]
    return markdown.table([*header, "times fewer tokens", *after], rows) if rows else ""


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def untuned(arms: Sequence[Arm]) -> str:
    """A warning of arms whose best rate is the lowest or highest that was run; "" if there are none."""
    names = [arm.name for arm in arms if arm.best_rate in (arm.losses.index.min(), arm.losses.index.max())]
    return f"**Not tuned to the end:** a rate that was not run may be better for {'; '.join(names)}.\n" if names else ""


def size_table(experiments: Sequence[Experiment]) -> str:
    """How differences change with size at equal tokens per parameter, and the rule that carries rates up; "" if neither.

    A line is fitted to the differences of all seeds, each arm at its best rate, over the logarithm of the parameters;
    and one to the logarithm of the best rates of references that have worse rates on both sides.
    """
    points, rates = [], []
    for one in experiments:
        reference, size = one.arms[0], math.log2(one.parameters)
        kind = one.config.optimizer.name, f"{one.tokens_per_parameter:.2g}"
        if reference.losses.index.min() < reference.best_rate < reference.losses.index.max():
            rates.append((*kind, size, math.log2(reference.best_rate)))
        for pair in pairs(one.arms):
            values = pair.differences[np.isfinite(pair.differences)] if pair.at_best else []
            points += [(*kind, pair.arm.name, size, value) for value in values]
    kinds = ["optimizer", "tokens per parameter"]
    rows, text = [], ""
    groups = pd.DataFrame(points, columns=[*kinds, "arm", "size", "difference"]).groupby([*kinds, "arm"], sort=False)
    for words, group in groups:
        if (sizes := group["size"].nunique()) > 2:
            line = stats.linregress(group["size"], group["difference"])
            half = half_width(line.stderr, len(group) - 2)
            rows.append([*words, sizes, f"{line.slope - half:+.4f} to {line.slope + half:+.4f}"])
    if rows:
        text = markdown.table([*kinds, "arm", "sizes", "change of the difference when parameters double (95 %)"], rows)
    for words, group in pd.DataFrame(rates, columns=[*kinds, "size", "rate"]).groupby(kinds, sort=False):
        if group["size"].nunique() > 1:
            size, rate = group.loc[group["size"].idxmax(), ["size", "rate"]]
            power = f"(N / {2**size:,.0f})^{stats.linregress(group['size'], group['rate']).slope:.2f}"
            text += f"\n{words[0]}, {words[1]} tokens per parameter: best rates carried up: {2**rate:.4g} {power}.\n"
    return text


def plot(experiments: Sequence[Experiment], path: Path) -> Path:
    """A row for each experiment: loss, difference and condition number of every seed over tokens per parameter, from a
    tenth of the tokens on: the start hides the rest."""
    figure, rows = subplots(len(experiments), 3, width=3.6, height=2.8, squeeze=False)
    names = ("validation loss (nats)", "difference (nats)", "condition number")
    for panels, one in zip(rows, experiments, strict=True):
        losses, differences, conditions = panels

        def draw(axes, course: pd.Series, *style, one: Experiment = one, **options) -> None:
            over = course.set_axis(course.index / one.parameters)
            late = over[over.index > one.tokens_per_parameter / 10]
            axes.plot(late.index, late, *style, linewidth=1, **options)

        colors = {arm.name: f"C{i}" for i, arm in enumerate(one.arms)}
        for arm in one.arms:
            label = f"{arm.name}, {value_label(arm.best_rate)}"
            for seed in arm.judged(arm.best_rate).index:
                for axes, key in ((losses, VALIDATION), (conditions, CONDITION[0])):
                    draw(axes, arm.course(key, arm.best_rate, seed), color=colors[arm.name], label=label)
                label = None  # one line of the legend per arm
        for pair in pairs(one.arms):
            for _, course in pair.courses.items():
                draw(differences, course.dropna(), "-" if pair.at_best else ":", color=colors[pair.arm.name])
        differences.axhline(0, color="black", linewidth=0.5)
        for axes, name in zip(panels, names, strict=True):
            axes.set_xlabel("tokens per parameter")
            axes.set_ylabel(name)
        losses.set_title(one.name, fontsize=8, loc="left")
        losses.legend(fontsize=6)
    return save(figure, path)


def report(folder: Path, margin: float) -> list[Path]:
    """Write tables.md and a figure for each study, from `folder`/runs.jsonl."""
    studies: dict[str, list[Experiment]] = {}
    for experiment in read_experiments(folder):
        studies.setdefault(experiment.study, []).append(experiment)
    text = regime_table([one for experiments in studies.values() for one in experiments])
    for experiments in studies.values():
        for one in experiments:
            tables = [arm_table(one.arms), untuned(one.arms), pair_table(one.arms, margin)]
            text += "\n".join([f"\n## {one.name}\n", *filter(None, tables)])
        text += "\n" + size_table(experiments)
    write_atomically(folder / "tables.md", text + NOTES.format(margin=margin))
    return [folder / "tables.md", *(plot(experiments, folder / study) for study, experiments in studies.items())]

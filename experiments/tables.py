"""Tables and figures of the runs that `experiments.evidence` collects."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from experiments.contrasts import (
    Preregistration,
    compare_means,
    contrast_table,
    interval_and_verdict,
    read_preregistration,
)
from experiments.evidence import (
    CONDITION,
    SIZES,
    Experiment,
    curve,
    digest,
    is_at_best,
    read_experiments,
    summary,
    without_tuning_seeds,
)
from pc_recipe.config.model_sizes import shape_of
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.pages import markdown
from pc_recipe.pages.plots import save, short_tokens, subplots
from pc_recipe.report import curves
from pc_recipe.runs.sweep.spec import value_label
from pc_recipe.train.optimizers import rate_factor

NOTES = """
Losses in nats per token, which for a vocabulary of bytes is per byte. ± is the standard error of the mean over seeds;
differences and times fewer tokens are computed per seed. The learning rate of an arm, in bold, was chosen on its tuning
seeds, or else its first seed; the results are those of the other seeds, if there are any. Interval: 95 %, of the difference
of the means, by {test}. Verdict: *lower* or *higher* if p, by Holm where given, is below 0.05;
else *no difference* if the interval lies inside ±{margin}; else *undecided*. "After n" is the difference after n
tokens, with the number of seeds in brackets if not all were validated then. A run whose final loss is not a number
diverged: its loss counts as infinite, and the plots leave it out. The condition number, norm and step of PC blocks are
those of an arm's own `pc.blocks`: arms with different blocks cannot be compared there.
"""


def mean_and_error(values: pd.Series) -> str:
    """Mean, its standard error if there are two values or more, and how many diverged."""
    diverged = (~np.isfinite(values)).sum()
    if diverged:
        return f"{diverged} of {len(values)} diverged"
    return f"{values.mean():.4f}" + (f" ± {values.sem():.4f}" if len(values) > 1 else "")


def half_width(error: Any, freedom: int) -> Any:
    """Half the width of a 95 % interval by Student's t, for one standard error or a series; infinite without degrees of
    freedom."""
    return stats.t.ppf(0.975, freedom) * error if freedom else math.inf


def regime_table(experiments: Sequence[Experiment]) -> str:
    """The regime of each experiment: that of its reference at the best rate, first seed."""
    header = "experiment|parameters|tokens per parameter|steps|warm-up|sum of rate x decay|std x sqrt(width)"
    rows = []
    for one in experiments:
        config, run = one.config, one.reference[one.reference.best].iloc[0]
        steps, warm_up = config.training.steps, config.lr_scheduler.warmup_steps / config.training.steps
        rate = 1.0 if config.optimizer.independent_decay else run.rate
        rates = map(rate_factor(config.lr_scheduler, steps), range(steps))
        decay = config.optimizer.weight_decay * rate * sum(rates)
        std = config.model.init_std * math.sqrt(shape_of(config.model).dim)
        condition = curve(run.log, CONDITION[0])
        ends = "-" if condition.empty else f"{condition.iloc[0]:.1f} to {condition.iloc[-1]:.1f}"
        sizes = [f"{one.parameters:,}", f"{one.tokens_per_parameter:.3g}", f"{steps:,}"]
        rows.append([one.name, *sizes, f"{warm_up:.1%}", f"{decay:.2f}", f"{std:.2f}", ends])
    return markdown.table([*header.split("|"), "condition number of the reference, start to end"], rows)


def arm_table(runs: pd.DataFrame) -> str:
    """Rows for each arm and rate, first for the seeds that chose the rate, then for the others: the final loss, condition
    numbers at the end (geometric means), and where logged the norm of the PC blocks at the end and their mean relative
    step."""
    rows = []
    sizes = {key: title for key, title in SIZES.items() if any(key in log for log in runs.log)}
    for (arm, rate, best, _), group in runs.groupby(["arm", "rate", "best", "chose"], sort=False):
        shown = f"**{value_label(rate)}**" if best else value_label(rate)
        ends = [pd.Series([summary(log, key) for log in group.log]).mean() for key in (*CONDITION, *sizes)]
        cells = [_cell(end, ".1f" if key in CONDITION else ".3g") for key, end in zip((*CONDITION, *sizes), ends)]
        rows.append([arm, shown, _seeds(group), mean_and_error(group.loss), *cells])
    header = "arm|learning rate|seeds|final validation loss|GMCN of PC blocks|of q, k, v|of all"
    return markdown.table([*header.split("|"), *sizes.values()], rows)


def pair_table(experiment: Experiment, plan: Preregistration) -> str:
    """Differences from the reference, by seed, at the end and at up to ten points of training; "" without a pair. A seed
    that chose a rate tests nothing."""
    reference = without_tuning_seeds(experiment.reference[experiment.reference.best])
    longest = max((curve(log, VALIDATION) for log in reference.log), key=len)
    places = np.linspace(0, len(longest) - 1, min(len(longest), 11)).round().astype(int)[1:]
    points = longest.index[places]
    rows = []
    for pair in experiment.pairs():
        one, speedup = pair.iloc[0], pd.Series(math.nan)
        if np.isfinite(pair.difference).all():
            both = [[curve(log, VALIDATION) for log in logs] for logs in zip(pair.log_reference, pair.log, strict=True)]
            speedup = pd.Series([curves.speedup(*loss_curves) for loss_curves in both])
        seeds = f"{_seeds(pair)} (chose a rate)" if pair.chose.any() else _seeds(pair)
        test = None if pair.chose.any() else compare_means(pair.loss, pair.loss_reference, plan.paired)
        cells = [
            mean_and_error(pair.difference),
            *interval_and_verdict(test, plan.margin),
            _cell(speedup.mean(), ".2f"),
        ]
        for _, then in _differences(pair).reindex(points).iterrows():
            count = f" ({then.count()})" if 0 < then.count() < len(then) else ""
            cells.append(_cell(then.mean(), "+.3f") + count)
        rows.append([one.arm, value_label(one.rate), value_label(one.rate_reference), seeds, *cells])
    header = ["arm", "learning rate", f"that of {reference.arm.iloc[0]}", "seeds", "difference", "interval", "verdict"]
    after = [f"after {short_tokens(tokens)}" for tokens in points]
    return markdown.table([*header, "times fewer tokens", *after], rows) if rows else ""


def _differences(pair: pd.DataFrame) -> pd.DataFrame:
    """[tokens, seed]: differences of validation losses where both runs were validated."""
    runs = zip(pair.seed, pair.log, pair.log_reference, strict=True)
    return pd.DataFrame({seed: curve(arm, VALIDATION) - curve(reference, VALIDATION) for seed, arm, reference in runs})


def _seeds(runs: pd.DataFrame) -> str:
    return ", ".join(map(str, runs.seed))


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def is_enclosed(arm: pd.DataFrame) -> bool:
    """Whether rates on both sides of an arm's best one were run."""
    best = arm.rate[arm.best].iloc[0]
    return arm.rate.min() < best < arm.rate.max()


def untuned(runs: pd.DataFrame) -> str:
    """A warning that names arms whose best rate is the lowest or highest that ran; "" if there are none."""
    names = [name for name, arm in runs.groupby("arm", sort=False) if not is_enclosed(arm)]
    return f"**Not tuned to the end:** a rate that was not run may be better for {'; '.join(names)}.\n" if names else ""


def size_table(experiments: Sequence[Experiment]) -> str:
    """How differences change with size at equal tokens per parameter, and how best rates extrapolate; "" if neither.

    Both are lines over the logarithm of the parameters: one fitted to the differences of all seeds, each arm at its best
    rate, and one to the logarithm of the references' best rates, of those with worse rates on both sides.
    """
    points, rates = [], []
    for one in experiments:
        reference, size = one.reference, math.log2(one.parameters)
        kind = one.config.optimizer.name, f"{one.tokens_per_parameter:.2g}"
        if is_enclosed(reference):
            rates.append((*kind, size, math.log2(reference.rate[reference.best].iloc[0])))
        for pair in filter(is_at_best, one.pairs()):
            values = pair.difference[np.isfinite(pair.difference)]
            points += [(*kind, pair.arm.iloc[0], size, value) for value in values]
    kinds = ["optimizer", "tokens per parameter"]
    rows, text = [], ""
    groups = pd.DataFrame(points, columns=[*kinds, "arm", "size", "difference"]).groupby([*kinds, "arm"], sort=False)
    for names, group in groups:
        if (sizes := group["size"].nunique()) > 2:
            line = stats.linregress(group["size"], group["difference"])
            half = half_width(line.stderr, len(group) - 2)
            rows.append([*names, sizes, f"{line.slope - half:+.4f} to {line.slope + half:+.4f}"])
    if rows:
        text = markdown.table([*kinds, "arm", "sizes", "change of the difference when parameters double (95 %)"], rows)
    for names, group in pd.DataFrame(rates, columns=[*kinds, "size", "rate"]).groupby(kinds, sort=False):
        if group["size"].nunique() > 1:
            size, rate = group.loc[group["size"].idxmax(), ["size", "rate"]]
            power = f"(N / {2**size:,.0f})^{stats.linregress(group['size'], group['rate']).slope:.2f}"
            text += f"\n{names[0]}, {names[1]} tokens per parameter, best rate at N parameters: {2**rate:.4g} {power}\n"
    return text


PLAIN = {
    "pc off": "baseline",
    "pc on": "PC",
    "level-4": "PC, level 4",
    "identity": "PC without polynomial",
    "scale": "larger weights",
    "scale-level-4": "PC + larger weights",
    "worsening": "worsening polynomial",
    "row-norm": "row norms",
    "muon": "Muon",
    "muon-level-2": "Muon + PC, level 2",
    "MuonH-level-2": "MuonH + PC, level 2",
    "dial-1": "p = 1",
    "dial-0.54": "p = 0.54",
    "dial-0.33": "p = 1/3",
    "dial-0": "p = 0",
    "dial-1.2": "p = 1.2",
    "spectrum-base+scale-base": "control",
    "spectrum-pc+scale-base": "PC's spectrum",
    "spectrum-base+scale-pc": "PC's norms and steps",
    "spectrum-pc+scale-pc": "both",
    "MuonH-spectrum-base": "MuonH, baseline's spectrum",
    "norm_recovery on": "",
    "norm_recovery off": "no recovery",
    "no-recovery": "PC without recovery",
    "learnable_gamma on": "",
    "learnable_gamma off": "no gamma",
    "level polar_express": "Polar Express",
    "warmup_steps 45": "longer warm-up",
}
"""{part of an arm's name: what figures call it}; parts without an entry keep their name"""


def plain(arm: str) -> str:
    return ", ".join(filter(None, (PLAIN.get(part, part) for part in arm.split(", "))))


def plot(experiments: Sequence[Experiment], path: Path, paired: bool, rows: str) -> Path:
    """Two rows of panels for each experiment. Over tokens per parameter, each arm at its best rate, the mean over seeds and
    its 95 % band: loss, difference by seed and condition number. Below: the final loss against the rate, of arms that ran at
    several, and the final differences.

    Args:
        paired: the plan's: whether the intervals of final differences are by seed.
        rows: `evidence.digest` of what is drawn, stored in the picture to show whether it is older than its rows.
    """
    figure, grid = subplots(2 * len(experiments), 3, width=4.0, height=2.8)
    for panels, one in zip(grid.reshape(-1, 6), experiments, strict=True):
        losses, differences, conditions, rates, finals, names_of_finals = panels
        names_of_finals.axis("off")
        minus = f"minus {plain(one.runs.arm.iloc[0])}"
        colors = {name: f"C{i}" for i, name in enumerate(one.runs.arm.unique())}
        best = {name: without_tuning_seeds(arm).log for name, arm in one.runs[one.runs.best].groupby("arm", sort=False)}
        for axes, key, name in (
            (losses, VALIDATION, "validation loss (nats per token)"),
            (conditions, CONDITION[0], "condition number"),
        ):
            _draw_bands(axes, one, colors, {arm: [curve(log, key) for log in logs] for arm, logs in best.items()})
            axes.set_ylabel(name)
        pairs = {pair.arm.iloc[0]: pair for pair in one.pairs() if is_at_best(pair)}
        over = {arm: [values for _, values in _differences(pair).items()] for arm, pair in pairs.items()}
        _draw_bands(differences, one, colors, over)
        differences.set_ylabel(f"{minus} (nats per token)")
        differences.axhline(0, color="black", linewidth=0.5)
        if one.runs.groupby("arm").rate.nunique().max() > 1:
            _draw_rates(rates, one, colors)
        else:
            rates.axis("off")
        _draw_finals(finals, pairs, colors, paired)
        finals.set_xlabel(f"final loss, {minus} (nats per token)")
        size = f"{one.parameters:,} parameters, {one.tokens_per_parameter:.3g} tokens per parameter"
        losses.set_title(f"{one.name}: {size}", fontsize=8, loc="left")
    return save(figure, path, metadata={"Rows": rows})


def _draw_bands(axes, one: Experiment, colors: dict[str, str], arms: dict[str, list[pd.Series]]) -> None:
    """Each arm's mean curve over tokens, the 95 % band of the mean, and the arm's name at its end."""
    ends = {}
    for arm, curves_of_seeds in arms.items():
        values = pd.concat(curves_of_seeds, axis=1)
        values = values[values.count(axis=1) == values.shape[1]]  # not where some curves have ended
        mean, n = _late(values.mean(axis=1), one), values.shape[1]
        if mean.empty:
            continue
        axes.plot(mean, color=colors[arm], linewidth=1.2)
        half = half_width(_late(values.sem(axis=1), one), n - 1)
        if n > 1:
            axes.fill_between(mean.index, mean - half, mean + half, color=colors[arm], alpha=0.2, linewidth=0)
        ends[arm] = mean.iloc[-1]
    axes.set_xlabel("tokens per parameter")
    order = sorted(ends, key=lambda arm: ends[arm])
    bottom, top = axes.get_ylim()
    apart = (top - bottom) / 16
    places = [ends[arm] for arm in order]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + apart)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top - apart * (len(places) - 1 - i))
    for arm, place in zip(order, places, strict=True):
        _name(axes, place, plain(arm), colors[arm])


def _name(axes, place: float, text: str, color: str):
    """`text` to the right of the axes."""
    return axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), color=color, fontsize=7, va="center")


def _draw_rates(axes, one: Experiment, colors: dict[str, str]) -> None:
    """Final loss against the rate, for each arm that ran at several: mean and standard error over the seeds that ran at the
    largest number of rates. Rates are relative to the arm's best, as those of optimizers differ in kind."""
    axes.set_xscale("log", base=math.sqrt(2))
    axes.xaxis.set_major_formatter("{x:.2g}")
    axes.set_xlabel("rate / the arm's best")
    axes.set_ylabel("final loss (nats per token)")
    for name, arm in one.runs.groupby("arm", sort=False):
        if arm.rate.nunique() == 1:
            continue
        counts = arm.seed.value_counts()
        losses = arm[arm.seed.isin(counts[counts == counts.max()].index)].groupby("rate").loss
        mean = losses.mean()[np.isfinite]  # without rates at which a run diverged
        at, error = mean.index / arm.rate[arm.best].iloc[0], losses.sem()[mean.index]
        axes.errorbar(at, mean, error, fmt="o-", color=colors[name], markersize=3, linewidth=1, capsize=2)


def _draw_finals(axes, pairs: dict[str, pd.DataFrame], colors: dict[str, str], paired: bool) -> None:
    """Final difference of each arm from the reference, both at their best rates: every seed, and if none diverged the mean
    with its 95 % interval."""
    for place, (name, pair) in enumerate(pairs.items()):
        color, mean = colors[name], pair.difference.mean()
        axes.plot(pair.difference, [place] * len(pair), ".", color=color, alpha=0.5, markersize=4)
        test = compare_means(pair.loss, pair.loss_reference, paired)
        if test is not None:
            half = test.confidence_interval().high - mean
            axes.errorbar(mean, place + 0.25, xerr=half, fmt="o", color=color, capsize=3, markersize=4)
        text = _name(axes, place, f"{plain(name)}, rate {value_label(pair.rate.iloc[0])}", color)
        text.set_in_layout(False)  # it stands in the empty panel
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set_yticks([])
    axes.set_ylim(max(len(pairs), 1) - 0.3, -0.7)


def _late(values: pd.Series, experiment: Experiment) -> pd.Series:
    """`values` by tokens per parameter, without the first tenth, whose large values would hide the rest."""
    over = values.set_axis(values.index / experiment.parameters)
    return over[over.index > experiment.tokens_per_parameter / 10]


def report(folder: Path) -> list[Path]:
    """From `folder`/runs.jsonl and its plan, write tables.md and a figure for each study in which an arm shares several
    seeds with its reference."""
    preregistration = read_preregistration(folder)
    studies: dict[str, list[Experiment]] = {}
    for experiment in read_experiments(folder):
        studies.setdefault(experiment.study, []).append(experiment)
    text = regime_table([one for experiments in studies.values() for one in experiments])
    for experiments in studies.values():
        for one in experiments:
            planned = contrast_table(one.runs, preregistration)
            tables = [planned, arm_table(one.runs), untuned(one.runs), pair_table(one, preregistration)]
            text += "\n".join([f"\n## {one.name}\n", *filter(None, tables)])
        text += "\n" + size_table(experiments)
    test = "Student's test of differences by seed" if preregistration.paired else "Welch's test of two groups of seeds"
    write_atomically(folder / "tables.md", text + NOTES.format(margin=preregistration.margin, test=test))
    return [
        folder / "tables.md",
        *(
            plot(experiments, folder / study, preregistration.paired, digest(folder))
            for study, experiments in studies.items()
            if any(len(pair) > 1 for one in experiments for pair in one.pairs())
        ),
    ]

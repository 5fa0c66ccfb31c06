"""Choose the stable run with the lowest final metric; write a table, a plot, and the choice as an overlay."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from pc.common import markdown, plots
from pc.common.files import write_atomically
from pc.common.run_folder import state_of
from pc.errors import UserError
from pc.sweep import equal_runs
from pc.sweep.results import collect
from pc.sweep.spec import Sweep, label, value_label


@dataclass(frozen=True)
class Candidate:
    """Runs that differ only in their seed."""

    config: str
    settings: dict[str, Any]
    metrics: list[float]
    spikes: int
    """of the worst seed"""
    complete: bool
    """whether every seed has finished"""
    stable: bool

    @property
    def mean(self) -> float:
        return sum(self.metrics) / len(self.metrics)


def select(sweep: Sweep) -> str:
    """Write table.md, the plot and selected-<config>.toml next to the results; returns what to print."""
    equal_runs.require_unchanged(sweep)
    results = collect(sweep)
    metric = sweep.select.metric
    if all(result[metric] is None for result in results):
        raise UserError(f"{sweep.path}: no finished run has a finite {metric!r}; see `scripts/sweep.py status`")
    candidates = _candidates(sweep, results)
    words = [_write_table(sweep, candidates, results)]
    for config in dict.fromkeys(run.config for run in sweep.runs):
        words.append(_choose(sweep, config, [c for c in candidates if c.config == config]))
    _plot(sweep, candidates)
    words.append(f"Table and plot: {sweep.folder}/table.md, {sweep.folder}/plot.png")
    return "\n".join(words)


def _candidates(sweep: Sweep, results: list[dict]) -> list[Candidate]:
    """Candidates with at least one finished run that logged the metric, in the sweep's order."""
    by_name = {result["name"]: result for result in results if result[sweep.select.metric] is not None}
    candidates = []
    for setting in dict.fromkeys(run.setting_name for run in sweep.runs):
        members = [run for run in sweep.runs if run.setting_name == setting]
        if finished := [by_name[run.name] for run in members if run.name in by_name]:
            metrics = [result[sweep.select.metric] for result in finished]
            spikes = max(result["spikes"] for result in finished)
            complete, stable = len(finished) == len(members), spikes <= sweep.select.spikes_allowed
            candidates.append(Candidate(members[0].config, members[0].settings, metrics, spikes, complete, stable))
    return candidates


def _choose(sweep: Sweep, config: str, candidates: list[Candidate]) -> str:
    """Write the overlay of the best candidate of one config; returns a line about it."""
    name = Path(config).stem
    best = min((c for c in candidates if c.stable and c.complete), key=lambda c: c.mean, default=None)
    if best is None:
        return f"{name}: nothing selected, because no setting is both finished for every seed and stable"
    destination = sweep.folder / f"selected-{name}.toml"
    overlay: dict[str, Any] = {"parent": _relative(Path(config), sweep.folder)}
    for key, value in best.settings.items():
        *sections, last = key.split(".")
        section = overlay
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = value
    comment = f"# Chosen by scripts/sweep.py select from {sweep.path.name}: {sweep.select.metric} {best.mean:.4f}\n"
    write_atomically(destination, comment + tomli_w.dumps(overlay))
    chosen = ", ".join(f"{key} = {json.dumps(value)}" for key, value in best.settings.items())
    said = f"{name}: {chosen or 'its own values'}, {sweep.select.metric} {best.mean:.4f} -> {destination}"
    waiting = sum(run.config == config for run in sweep.runs) - sum(len(c.metrics) for c in candidates)
    if waiting:
        said += f"\n  provisional: {waiting} runs of {name} are not counted"
    for key, values in sweep.axes.items():
        is_numeric = all(type(value) in (int, float) for value in values)
        if is_numeric and len(values) > 1 and best.settings[key] in (min(values), max(values)):
            said += f"\n  note: {key} = {best.settings[key]} is at an end of its grid; the optimum may be outside"
    return said


def _relative(file: Path, folder: Path) -> str:
    """`file` as seen from `folder`, without links among the folders: behind one, `..` is not the folder above."""
    return os.path.relpath(file.parent.resolve() / file.name, folder.resolve())


def _write_table(sweep: Sweep, candidates: list[Candidate], results: list[dict]) -> str:
    rule, keys = sweep.select, list(sweep.axes)
    rows = []
    for c in candidates:
        values = [json.dumps(c.settings[key]) for key in keys]
        stable = "yes" if c.stable else "no"
        rows.append([Path(c.config).stem, *values, f"{c.mean:.4f}", len(c.metrics), c.spikes, stable])
    text = markdown.table(["config", *keys, rule.metric, "runs", "spikes", "stable"], rows)
    text += (
        f"\nStable: at most {rule.spikes_allowed} spikes of the training loss in any seed (docs/analysis.md says what "
        "counts as one).\n"
    )
    without = {result["name"] for result in results if result[rule.metric] is None}
    not_counted = ""
    for run in sweep.runs:
        state = state_of(run.folder)
        if state.state != "finished":
            not_counted += f"- {run.name}: {state.state} {state.reason}".rstrip() + "\n"
        elif run.name in without:
            not_counted += f"- {run.name}: finished, but its last {rule.metric} is not a finite number\n"
    if not_counted:
        text += f"\nNot counted:\n{not_counted}"
    write_atomically(sweep.folder / "table.md", text)
    return text


def _plot(sweep: Sweep, candidates: list[Candidate]) -> None:
    """The metric over the longest axis, a line per config and combination of the others; unstable runs hollow."""
    key = max(sweep.axes, key=lambda name: len(sweep.axes[name]), default="")
    values = sweep.axes.get(key, ["run"])
    lines: dict[str, list[Candidate]] = {}
    for c in candidates:
        others = {name: value for name, value in c.settings.items() if name != key and len(sweep.axes[name]) > 1}
        lines.setdefault(", ".join([Path(c.config).stem, *filter(None, [label(others)])]), []).append(c)
    figure, axes = plots.subplots(width=6.0, height=3.6)
    for name, members in lines.items():
        places = [values.index(c.settings[key]) if key else 0 for c in members]
        means = [c.mean for c in members]
        ranges = [[c.mean - min(c.metrics) for c in members], [max(c.metrics) - c.mean for c in members]]
        color = axes.errorbar(places, means, ranges, label=name, linewidth=1).lines[0].get_color()
        axes.scatter(places, means, color=color, facecolors=[color if c.stable else "white" for c in members], zorder=3)
    axes.set_xticks(range(len(values)), [value_label(value) for value in values], rotation=30)
    axes.set_xlabel(key)
    axes.set_ylabel(sweep.select.metric.replace("_", " "))
    if not all(c.stable for c in candidates):
        axes.set_title("hollow: unstable", fontsize="small", loc="right")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    plots.save(figure, sweep.folder / "plot")

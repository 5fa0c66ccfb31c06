"""Choose the stable run with the lowest final validation loss; write a table, a plot, and the choice as an overlay."""

import json
import os
from pathlib import Path

import pandas as pd

from pc.errors import UserError
from pc_recipe.config.command_line import as_toml
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_log import VALIDATION
from pc_recipe.pages import markdown
from pc_recipe.runs.sweep import points
from pc_recipe.runs.sweep.results import collect
from pc_recipe.runs.sweep.spec import Sweep


def select(sweep: Sweep) -> str:
    """Write table.md, the plot and selected-<config>.toml next to the results; returns what to print.

    Raises:
        UserError: no run has a loss, or the losses of one config cannot be compared.
    """
    results = collect(sweep)
    if all(result[VALIDATION] is None for result in results):
        raise UserError(f"{sweep.path}: no finished run has a finite {VALIDATION!r}; see `scripts/sweep.py status`")
    points.plot(results, sweep.folder / "plot")  # first, because it refuses losses that cannot be compared
    table = _settings(sweep, results)
    lines = [_write_table(sweep, table)]
    lines += [_choose(sweep, config, rows) for config, rows in table.groupby("config", sort=False)]
    return "\n".join([*lines, f"Table and plot: {sweep.folder}/table.md, {sweep.folder}/plot.png"])


def _settings(sweep: Sweep, results: list[dict]) -> pd.DataFrame:
    """A row for each setting, over all its seeds, in the sweep's order: config, settings, loss (mean, NaN if no run
    has one), runs (with a loss), waiting (the others), spikes (of the worst seed, as far as they are known), unknown (whether
    those of a seed are not) and stable: "yes", "no" or "unknown"."""
    runs = pd.DataFrame(
        [(run.setting_name, run.config, run.settings) for run in sweep.runs],
        columns=["setting", "config", "settings"],
        index=[run.name for run in sweep.runs],
    )
    runs = runs.join(pd.DataFrame(results).set_index("name")[[VALIDATION, "spikes"]].astype(float))
    runs["unknown"] = runs[VALIDATION].notna() & runs.spikes.isna()
    table = runs.groupby("setting", sort=False).agg(
        config=("config", "first"),
        settings=("settings", "first"),
        loss=(VALIDATION, "mean"),
        runs=(VALIDATION, "count"),
        waiting=(VALIDATION, lambda losses: losses.isna().sum()),
        spikes=("spikes", "max"),
        unknown=("unknown", "any"),
    )
    stable = table.unknown.map({True: "unknown", False: "yes"})
    return table.assign(stable=stable.mask(table.spikes > sweep.spikes_allowed, "no"))


def _choose(sweep: Sweep, config: str, rows: pd.DataFrame) -> str:
    """Write the overlay of the best setting of one config; returns a line about it."""
    name = Path(config).stem
    eligible = rows[(rows.stable != "no") & (rows.waiting == 0)]
    if eligible.empty:
        return f"{name}: nothing selected, because no setting is both finished for every seed and stable"
    best = eligible.loc[eligible.loss.idxmin()]
    destination = sweep.folder / f"selected-{name}.toml"
    # None: the config does not set it
    chosen = {key: value for key, value in best.settings.items() if value is not None}
    lines = [f"{key} = {as_toml(value)}" for key, value in chosen.items()]
    comment = f"# Chosen by scripts/sweep.py select from {sweep.path.name}: {VALIDATION} {best.loss:.4f}"
    parent = f"parent = {as_toml(_relative(Path(config), sweep.folder))}"
    write_atomically(destination, "\n".join([comment, parent, *lines, ""]))
    message = f"{name}: {', '.join(lines) or 'its own values'}, {VALIDATION} {best.loss:.4f} -> {destination}"
    if best.stable == "unknown":
        message += (
            "\n  note: whether this is stable is not known: too few losses were logged to look for spikes "
            "(metrics.log_freq above 12, or a short run)"
        )
    if waiting := rows.waiting.sum():
        message += f"\n  provisional: {waiting} runs of {name} have no loss; see `scripts/sweep.py status`"
    for key, value in chosen.items():
        values = [settings[key] for settings in rows.settings]
        is_numeric = all(type(one) in (int, float) for one in values)
        if is_numeric and min(values) < max(values) and value in (min(values), max(values)):
            message += f"\n  note: {key} = {value} is at an end of its grid; the optimum may be outside"
    return message


def _relative(file: Path, folder: Path) -> str:
    """`file` relative to `folder`, with links among the folders resolved: behind one, `..` is not the folder above."""
    return os.path.relpath(file.parent.resolve() / file.name, folder.resolve())


def _write_table(sweep: Sweep, table: pd.DataFrame) -> str:
    keys = list(sweep.runs[0].settings)
    rows = []
    for row in table[table.runs > 0].itertuples():
        values = [json.dumps(row.settings[key]) for key in keys]
        spikes = "-" if row.unknown and not row.spikes > 0 else int(row.spikes)
        rows.append([Path(row.config).stem, *values, f"{row.loss:.4f}", row.runs, spikes, row.stable])
    text = markdown.table(["config", *keys, VALIDATION, "runs", "spikes", "stable"], rows) + (
        f"\nStable: at most {sweep.spikes_allowed} spikes of the training loss in any seed (docs/analysis.md says what "
        "counts as one); unknown: too few losses were logged to look for them.\n"
    )
    write_atomically(sweep.folder / "table.md", text)
    return text

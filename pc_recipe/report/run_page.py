"""What runs came to, as one page and as a few lines: losses, conditioning, text, cost, and what they do not show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from pc.blocks import BLOCK_SUFFIXES
from pc.errors import UserError
from pc.report import draw, html
from pc.spectral import singular_values
from pc_recipe.config import read_config
from pc_recipe.config.headline import headline
from pc_recipe.evaluate import plain_weights
from pc_recipe.evaluate.generate import continue_text
from pc_recipe.evaluate.hugging_face import load_checkpoint
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.run_folder import find_newest_checkpoint, read_environment, read_state
from pc_recipe.files.run_log import RunLog, read_logs, unique_names
from pc_recipe.pages.plots import legend_below, save, short_tokens, subplots
from pc_recipe.report import curves, diagnostics, settings
from pc_recipe.runs.sweep import points

PROMPT, TOKENS, CHARACTERS = "The river", 120, 300
"""What a model continues, by so many tokens at most, of which so many characters are shown, as they are."""
BLOCK = "up"
"""Singular values are drawn for this block of the middle layer. It was chosen before any were seen."""
_CONDITION = "spectra/gmcn/pc"
_ONE_SEED = (
    "One run each: another seed moves a final loss too, and nothing here says by how much. No learning rate was tuned "
    "for its run, unless you did so. A short run of a small model says nothing about a large one."
)


@dataclass(frozen=True)
class _Shown:
    """A run, as far as the page shows it."""

    name: str
    headline: str
    blocks: str
    """whose condition numbers it has logged"""
    log: RunLog
    state: str
    sigma: Tensor | None
    """Singular values of the drawn matrix; None without a checkpoint."""
    text: str

    @property
    def described(self) -> str:
        return f"{self.name}: {self.headline}" + ("" if self.state in curves.FINISHED else f", {self.state}")

    def last(self, key: str) -> float:
        """NaN if it was never logged."""
        series = self.log.series(key)
        return series.iloc[-1] if len(series) else math.nan

    @property
    def seconds(self) -> float:
        """Of all its training steps."""
        return next(iter(self.log.seconds().tail(1)), 0.0)


def write(paths: Sequence[Path], output: Path, sweeps: Sequence[Path] = ()) -> str:
    """Write the page of runs, the reference first, and beside it a picture as PNG; returns a summary for a terminal.

    Args:
        sweeps: folders with results.jsonl. Their final losses are drawn, with the runs, if any, as dashed lines.

    Raises:
        UserError: a folder without a run, without validations, or validated on other text than the first; for sweeps,
            as `points.panels`.
    """
    logs = curves.marked(read_logs(paths)) if paths else []
    points_of_sweeps = _sweeps(sweeps, logs)
    if not logs:
        write_atomically(output, html.document("Sweeps", ["<h1>Sweeps</h1>", *points_of_sweeps]))
        return str(output)
    rows = curves.compare(logs)
    runs = [_show(log) for log in logs]
    differ = settings.differences(logs)
    key, unit = curves.unit(logs)
    verdicts = [_verdict(rows, i, unit) for i in range(1, len(runs))]
    title = verdicts[0] if verdicts else f"{runs[0].name}: {runs[0].headline}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p class=head>{escape(line)}</p>" for line in verdicts[1:]),
        "<p class=advice>" + "<br>".join(escape(run.described) for run in runs) + "</p>",
        *_losses(logs, rows),
        *_conditioning(runs),
        *_text(runs),
        *_cost(runs),
        *points_of_sweeps,
        "<h2>Settings in which they differ</h2>",
        _list(differ or ["none"]),
        "<h2>What this does not show</h2>",
        f"<p>{escape(_ONE_SEED)}</p>",
        *_more(logs),
    ]
    write_atomically(output, html.document(title, parts))
    _draw_picture(title, runs, rows, output.with_suffix(""))
    lines = [f"{run.described}. {_figures(run, key, unit)}" for run in runs]
    texts = ", ".join(f"{run.name}: {shorten(run.text, 60)}" for run in runs)
    keys = ", ".join(dict.fromkeys(line.partition(":")[0] for line in differ)) or "no setting"
    last = f"They differ in {keys}. " * (len(runs) > 1) + f"One seed each: {output} says what that does not show."
    return "\n".join([*lines, *verdicts, texts, last])


def _show(log: RunLog) -> _Shown:
    folder = log.file.parent
    config = read_config(folder)
    checkpoint = find_newest_checkpoint(folder)
    sigma, text = None, "no checkpoint"
    if checkpoint is not None:
        run = plain_weights.load(checkpoint)
        layer = run.model_args.n_layers // 2
        sigma = singular_values(run.weights[f"layers.{layer}.{BLOCK_SUFFIXES[BLOCK][0]}.weight"]).flip(-1)
        try:
            model, tokenizer = load_checkpoint(run)
            text = continue_text(model, tokenizer.to_transformers(run.model_args.max_seq_len), PROMPT, TOKENS)
            text = text[:CHARACTERS]
        except UserError as error:  # the tokenizer is gone; all else can be shown
            text = str(error)
    name = headline(config) if config else "its configuration is not known"
    return _Shown(log.name, name, settings.blocks(config), log, read_state(folder).state, sigma, text)


def _verdict(rows: pd.DataFrame, i: int, unit: str) -> str:
    """How a run ends against the first: the sentence is made from the numbers."""
    row, reference = rows.iloc[i], rows.iloc[0]
    if row.apart:
        return f"{row['name']} is not compared with {reference['name']}: {row.apart}"
    if not math.isfinite(row.difference):
        return f"{row['name']} cannot be compared with {reference['name']}: a final loss is not finite"
    side = "below" if row.difference < 0 else "above"
    sentence = f"{row['name']} ends {abs(row.difference):.3f} {unit} {side} {reference['name']}"
    if row.speedup > 1:
        reached = f"{short_tokens(row.reached_at_tokens)} of {short_tokens(reference.reached_at_tokens)} tokens"
        return f"{sentence}, whose final loss it reaches after {reached} ({1 - 1 / row.speedup:.0%} saved)"
    if math.isnan(row.speedup):
        return f"{sentence}, after {short_tokens(row.tokens)} of {short_tokens(reference.tokens)} tokens"
    return sentence if row.difference < 0 else f"{sentence}: it saves no tokens here"


def _figures(run: _Shown, key: str, unit: str) -> str:
    condition = run.last(_CONDITION)
    found = [f"Validation loss {run.last(key):.3f} {unit}"]
    found += [f"condition number {condition:.1f}"] if math.isfinite(condition) else []
    found += [f"{_duration(run.seconds)} of steps"] if run.seconds else []
    return ", ".join(found)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _draw_conditions(axes: Any, runs: Sequence[_Shown]) -> None:
    for i, run in enumerate(runs):
        curve = run.log.series(_CONDITION)
        axes.plot(curve.index, curve, color=f"C{i}", marker=".", markersize=3, label=run.name)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step")
    axes.set_ylabel("condition number")


def _draw_picture(title: str, runs: Sequence[_Shown], rows: pd.DataFrame, path: Path) -> None:
    """Losses and condition numbers as a PNG, for where no page can be shown."""
    figure, (left, right) = subplots(1, 2, width=4.4, height=3.2)
    curves.draw_validation(left, [run.log for run in runs], rows)
    _draw_conditions(right, runs)
    right.set_title(f"of {_of_blocks(runs)[0]}: geometric mean", fontsize=8)
    figure.suptitle(title, fontsize=9, parse_math=False)
    legend_below(figure, left)
    save(figure, path)


def _losses(logs: Sequence[RunLog], rows: pd.DataFrame) -> list[str]:
    header = ["run", "steps", "tokens", "final validation loss", "difference", "reaches the first one's loss after"]
    table, (_, unit) = [], curves.unit(logs)
    for row in rows.itertuples():
        final = f"{row.final_loss:.4f}" + (f" ({row.nats:.4f} nats per token)" if unit != "nats per token" else "")
        losses = [final, "-" if math.isnan(row.difference) else f"{row.difference:+.4f}"]
        faster = "-" if math.isnan(row.speedup) else f"{row.speedup:.2f}x"
        table.append([row.name, f"{row.steps:,}", short_tokens(row.tokens), *losses, curves.reached(row), faster])
    note = (
        f"Losses are in {unit}. Difference and speedup are against the first run. Between two validations the "
        "loss is interpolated. A speedup below 1 means that the first needs fewer tokens."
    )
    if rows.tokens.nunique() > 1:
        note += (
            " The runs saw different numbers of tokens: each final loss is at the run's own end, and with learning rates "
            "that decay to the end the speedup is not a fair comparison."
        )
    figure = _figure("Validation loss", lambda axes: curves.draw_validation(axes, logs, rows))
    return ["<h2>Losses</h2>", figure, html.table([*header, "speedup in tokens"], table), f"<p class=faint>{note}</p>"]


def _more(logs: Sequence[RunLog]) -> list[str]:
    """Everything else that was logged, and what was not."""
    panels = {
        "Training loss": lambda axes: curves.draw_training(axes, logs),
        "Training loss against time": lambda axes: curves.draw_training(axes, logs, by_time=True),
        "Validation loss against time": lambda axes: curves.draw_validation_over_time(axes, logs),
    }
    figures, missing = "", []
    for title, draw_in in (panels | diagnostics.panels(logs)).items():
        try:
            figures += _figure(title, draw_in)
        except UserError as error:  # the others can be drawn
            missing.append(str(error))
    return ["<h2>More</h2>", f"<div class=panels>{figures}</div>", _list(list(dict.fromkeys(missing)))]


def _sweeps(folders: Sequence[Path], baselines: Sequence[RunLog]) -> list[str]:
    """The final losses of each sweep's settings. A sweep's name is as much of its folder's path as is needed."""
    names = unique_names([folder.resolve() for folder in folders])
    parts = []
    for name, folder in zip(names, folders, strict=True):
        panels = points.panels(points.read_results(folder), baselines)
        figures = "".join(_figure(title, draw_in) for title, draw_in in panels.items())
        parts += [f"<h2>Sweep {escape(name)}</h2>", f"<div class=panels>{figures}</div>"]
    return parts


def _conditioning(runs: Sequence[_Shown]) -> list[str]:
    spectra = {run.name: run.sigma for run in runs if run.sigma is not None}
    figures = ""
    if any(_CONDITION in run.log.keys() for run in runs):
        names, more = _of_blocks(runs)
        caption = f"Geometric mean over the matrices; 1 is the least.{more}"
        figures += _figure(f"Condition number of {names}", lambda axes: _draw_conditions(axes, runs), caption)
    if spectra:
        title, caption = (
            f"Singular values of {BLOCK}, middle layer",
            "Of the weight that the model uses, at the last checkpoint.",
        )
        figures += _figure(title, lambda axes: draw.histogram_of(axes, spectra), caption)
    return ["<h2>Conditioning</h2>", f"<div class=panels>{figures}</div>" if figures else "<p>Nothing was logged.</p>"]


def _of_blocks(runs: Sequence[_Shown]) -> tuple[str, str]:
    """The matrices whose condition numbers the runs have logged; and, where these differ, a sentence about it."""
    if len({run.blocks for run in runs}) == 1:
        return runs[0].blocks, ""
    each = "; ".join(f"{run.blocks} in {run.name}" for run in runs)
    return "different matrices in each run", f" They cannot be compared: {each}."


def _figure(title: str, lines: Any, caption: str = "") -> str:
    return f"<figure>{draw.svg(title, lines)}<figcaption>{escape(caption)}</figcaption></figure>"


def _text(runs: Sequence[_Shown]) -> list[str]:
    header = f"<h2>What each writes after “{escape(PROMPT)}”</h2>"
    return [header, *(f"<p><b>{escape(run.name)}</b><br>{escape(run.text)}</p>" for run in runs)]


def _cost(runs: Sequence[_Shown]) -> list[str]:
    header = ["run", "seconds a step, median", "of them PC", "all steps", "memory (GiB)", "machine"]
    rows = []
    for run in runs:
        seconds, of_pc = run.log.series("step_seconds"), run.log.series("pc_seconds")
        memory = run.last("memory_active_gib_of_all_ranks")
        machine = read_environment(run.log.file.parent)
        where = machine.get("gpus") or [f"{machine.get('cpu_cores', 'unknown number of')} CPU cores"]
        step = f"{seconds.median():.3g}" if len(seconds) else "-"
        share = f"{of_pc.median():.3g} ({(of_pc / seconds).median():.1%})" if len(of_pc) else "-"
        rows.append([run.name, step, share, _duration(run.seconds), f"{memory:.2f}", ", ".join(map(str, where))])
    return [
        "<h2>What it cost</h2>", html.table(header, rows),
        "<p class=faint>Of PC: its two passes, measured within the run. Their share falls with more tokens per step: PC is computed "
        "once per step, however many there are.</p>",
    ]  # fmt: skip


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"

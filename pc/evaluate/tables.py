"""Scores of several models as a Markdown table, a CSV and a bar plot."""

import csv
import io
import math
from pathlib import Path
from typing import Any

from pc.common import markdown, plots
from pc.common.files import write_atomically
from pc.evaluate.tasks import METRICS, SHORT_NAMES

AVERAGE = "average"
Scores = dict[str, tuple[float, float | None]]  # task or AVERAGE: value, standard error


def write(results: list[dict[str, Any]], names: list[str], stem: Path) -> list[Path]:
    """Write `stem`.md, .csv and .png of one result per model, as `pc.evaluate.score` keeps them, and of these tasks."""
    rows = [scores_of(result, names) for result in results]
    table, comma_separated = stem.with_name(f"{stem.name}.md"), stem.with_name(f"{stem.name}.csv")
    write_atomically(table, _markdown(results, rows, names))
    write_atomically(comma_separated, _csv(results, rows))
    return [table, comma_separated, plots.save(_plot(results, rows, names), stem)]


def scores_of(result: dict[str, Any], names: list[str]) -> Scores:
    """Each task's score by the paper's metric, and their average.

    The items of different tasks are independent, so the average's error is sqrt(sum of squares) / number.
    """
    found = {name: result["tasks"][name] for name in names}
    scores = {name: (one[METRICS[name]], one[f"{METRICS[name]}_stderr"]) for name, one in found.items()}
    values, errors = zip(*scores.values(), strict=True)
    error = None if None in errors else math.hypot(*errors) / len(errors)
    return scores | {AVERAGE: (sum(values) / len(values), error)}


def _markdown(results: list[dict[str, Any]], rows: list[Scores], names: list[str]) -> str:
    titles = [f"{_title(name, results)} ({METRICS[name]})" for name in names]
    lines = [
        [result["name"], *(_cell(rows, index, column) for column in rows[index])]
        for index, result in enumerate(results)
    ]
    notes = ["Zero-shot, value ± standard error; bold is the best of each pair of models."]
    if missing := [name for name in METRICS if name not in names]:
        notes.append(f"**Not the paper's average**: without {', '.join(missing)}.")
    if results[0]["limit"]:
        notes.insert(0, f"**PARTIAL: only the first {results[0]['limit']} items of each task.**")
    return "\n".join([*notes, "", markdown.table(["model", *titles, f"Average of {len(names)}"], lines)])


def _cell(rows: list[Scores], index: int, column: str) -> str:
    """Value and error; bold for the better of models 1 and 2, of 3 and 4, ... An odd number of models is one group."""
    size = 2 if len(rows) % 2 == 0 else len(rows)
    start = index - index % size
    values = [row[column][0] for row in rows[start : start + size]]
    value, error = rows[index][column]
    text = f"**{value:.4f}**" if value == max(values) > min(values) else f"{value:.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def _title(name: str, results: list[dict[str, Any]]) -> str:
    """The task's short name, and the text variant if it is not lm-eval's."""
    variants = {result["tasks"][name].get("variant", "") for result in results} - {""}
    return f"{SHORT_NAMES[name]}, {' or '.join(variants)}" if variants else SHORT_NAMES[name]


def _csv(results: list[dict[str, Any]], rows: list[Scores]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["model", "task", "metric", "value", "standard_error", "items", "limit", "variant"])
    for result, row in zip(results, rows, strict=True):
        for column, (value, error) in row.items():
            found = result["tasks"].get(column, {})
            cells = [result["name"], column, METRICS.get(column, "mean"), value, error, found.get("items")]
            writer.writerow([*cells, result["limit"], found.get("variant")])
    return file.getvalue()


def _plot(results: list[dict[str, Any]], rows: list[Scores], names: list[str]):
    columns = [*names, AVERAGE]
    figure, axes = plots.subplots(width=max(5.0, 1.1 * len(columns)), height=3.2)
    width = 0.8 / len(rows)
    for index, (result, row) in enumerate(zip(results, rows, strict=True)):
        places = [place + (index - (len(rows) - 1) / 2) * width for place in range(len(columns))]
        axes.bar(
            places,
            [row[column][0] for column in columns],
            width,
            yerr=[row[column][1] or 0.0 for column in columns],
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
            label=result["name"],
        )
    titles = [_title(name, results) for name in names] + ["average"]
    axes.set_xticks(range(len(columns)), titles, rotation=20, ha="right")
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    axes.set_ylabel("accuracy (fraction of items)")
    partial = f"\nPARTIAL: first {results[0]['limit']} items per task" if results[0]["limit"] else ""
    figure.suptitle(f"Zero-shot scores, ± standard error{partial}")  # with few tasks wider than the axes
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure

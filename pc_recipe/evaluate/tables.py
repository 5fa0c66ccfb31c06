"""Scores of several models as a Markdown table, a CSV and a bar plot."""

import itertools
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pc_recipe.evaluate.tasks import METRICS, PAPERS, SHORT_NAMES
from pc_recipe.files.atomic import write_atomically
from pc_recipe.pages import markdown, plots

AVERAGE = "average"


def write(results: list[dict[str, Any]], names: list[str], stem: Path) -> list[Path]:
    """Write `stem`.md, .csv and .png of these tasks, from one result per model as `pc_recipe.evaluate.score` stores it."""
    rows = scores(results, names)
    models = [result["name"] for result in results]
    values, errors = (
        rows.pivot(index="task", columns="model", values=key).reindex(names, columns=models).astype(float)
        for key in ("value", "standard_error")
    )
    values.loc[AVERAGE] = values.mean()
    # the items of different tasks are independent
    errors.loc[AVERAGE] = np.sqrt(errors.pow(2).sum(skipna=False)) / len(names)
    limit = results[0]["limit"]
    partial = f"PARTIAL: only the first {limit} items of each task" if limit else ""
    titles = [_title(name, results) for name in names]
    table, comma_separated = stem.with_name(f"{stem.name}.md"), stem.with_name(f"{stem.name}.csv")
    write_atomically(table, _markdown(values, errors, _find_bold(values, results, names), titles, partial))
    write_atomically(comma_separated, rows.to_csv(index=False))
    return [table, comma_separated, plots.save(_plot(values, errors, titles, partial), stem)]


def scores(results: list[dict[str, Any]], names: list[str]) -> pd.DataFrame:
    """A row per model and task, by the paper's metric."""
    rows = []
    for result in results:
        for name in names:
            one, metric = result["tasks"][name], METRICS[name]
            row = {"model": result["name"], "task": name, "metric": metric, "value": one[metric]}
            row |= {"standard_error": one[f"{metric}_stderr"], "items": one["items"], "limit": result["limit"]}
            rows.append(row | {"variant": one.get("variant")})
    return pd.DataFrame(rows, dtype=object)


def paired_errors(one: dict[str, Any], other: dict[str, Any], names: list[str]) -> list[float]:
    """Standard errors of the difference of two results, which have the same items, for each task and the average.

    Infinite with one item, or if an older version stored no scores of items.
    """
    errors = []
    for name in names:
        a, b = (list(map(int, result["tasks"][name].get(f"{METRICS[name]}_of_items", ""))) for result in (one, other))
        if len(a) < 2 or len(a) != len(b):
            errors.append(math.inf)
        else:
            errors.append(float(np.subtract(a, b).std(ddof=1)) / math.sqrt(len(a)))
    return [*errors, math.hypot(*errors) / len(names)]


def _find_bold(values: pd.DataFrame, results: list[dict[str, Any]], names: list[str]) -> np.ndarray:
    """[tasks and average, models]: where a model is ahead of all others of its pair by more than a paired standard error.

    Pairs are models 1 and 2, 3 and 4, ...; an odd number of models is one group.
    """
    size = 2 if len(results) % 2 == 0 else len(results)
    bold = np.full(values.shape, size > 1)
    for i, j in itertools.permutations(range(len(results)), 2):
        if i // size == j // size:
            ahead = values.iloc[:, i] - values.iloc[:, j]
            bold[:, i] &= ahead > paired_errors(results[i], results[j], names)
    return bold


def _title(name: str, results: list[dict[str, Any]]) -> str:
    """The task's short name, and the text variant if it is not lm-eval's."""
    variants = {result["tasks"][name].get("variant", "") for result in results} - {""}
    return f"{SHORT_NAMES[name]}, {' or '.join(variants)}" if variants else SHORT_NAMES[name]


def _markdown(values: pd.DataFrame, errors: pd.DataFrame, bold: np.ndarray, titles: list[str], partial: str) -> str:
    """A row per model; no cell of numbers wraps."""
    names, lines = values.index[:-1], []
    for i, model in enumerate(values):
        lines.append([model])
        for value, error, is_bold in zip(values[model], errors[model], bold[:, i], strict=True):
            cell = f"**{value:.4f}**" if is_bold else f"{value:.4f}"
            lines[-1].append(cell if math.isnan(error) else f"{cell}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{error:.4f}")
    notes = [
        "Zero-shot, value ± standard error. Bold: better than the other of its pair by more than the standard error of their "
        "difference on the same items."
    ]
    if set(names) != set(PAPERS):
        notes.append(f"**Not the paper's average**, which is over {', '.join(PAPERS)}.")
    if partial:
        notes.insert(0, f"**{partial}.**")
    header = [f"{title} ({METRICS[name]})" for title, name in zip(titles, names, strict=True)]
    return "\n".join([*notes, "", markdown.table(["model", *header, f"Average of {len(names)}"], lines)])


def _plot(values: pd.DataFrame, errors: pd.DataFrame, titles: list[str], partial: str):
    figure, axes = plots.subplots(width=max(5.0, 1.1 * len(values)), height=3.2)
    style = {"elinewidth": 0.8, "capsize": 1.5}
    values.plot.bar(ax=axes, width=0.8, yerr=errors.fillna(0.0), error_kw=style, xlabel="")
    axes.set_xticklabels([textwrap.fill(title, 13) for title in (*titles, AVERAGE)], rotation=0)
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)
    axes.set_ylabel("accuracy (fraction of items)")
    figure.suptitle("\n".join(["Zero-shot scores, ± standard error", partial]).strip())  # may be wider than the axes
    axes.get_legend().remove()
    plots.legend_below(figure, axes)
    return figure

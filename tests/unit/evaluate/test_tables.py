"""Averages, errors and marks against numbers computed by hand."""

import csv

import pytest

from pc_recipe.evaluate import tables
from pc_recipe.evaluate.tasks import METRICS, PAPERS


def result(name, value, error=0.03, limit=None):
    task = {"acc": value, "acc_stderr": error, "acc_norm": value / 2, "acc_norm_stderr": error, "items": 10}
    task |= {f"{metric}_of_items": ("1" * round(10 * task[metric])).ljust(10, "0") for metric in ("acc", "acc_norm")}
    return {"name": name, "limit": limit, "tasks": {task_name: dict(task) for task_name in METRICS}}


def written(results, names, folder):
    """Text of the table, and {(model, task): row} of the CSV."""
    files = tables.write(results, names, folder / "table")
    assert [path.name for path in files] == ["table.md", "table.csv", "table.png"]
    assert all(path.stat().st_size for path in files)
    rows = csv.DictReader((folder / "table.csv").open())
    return (folder / "table.md").read_text(), {(row["model"], row["task"]): row for row in rows}


def test_four_models_in_pairs(tmp_path):
    results = [result("A", 0.2), result("A|PC", 0.4), result("B", 0.6), result("B|PC", 0.4)]
    results[0]["tasks"]["lambada_openai"]["variant"] = "text without line breaks"
    text, rows = written(results, list(PAPERS), tmp_path)
    assert rows["A", "piqa"]["value"] == "0.2" and rows["A", "hellaswag"]["value"] == "0.1"  # acc_norm
    # five tasks with acc, four with acc_norm, which is half of it here
    (of_b,) = (line for line in text.splitlines() if line.startswith("| B |"))
    assert of_b.endswith(f"**{(5 * 0.6 + 4 * 0.3) / 9:.4f}**\u00a0±\u00a0{0.03 / 3:.4f} |")
    assert [key for key, row in rows.items() if row["variant"]] == [("A", "lambada_openai")]
    assert "PARTIAL" not in text and "Not the paper's average" not in text
    assert "| LAMBADA, text without line breaks (acc) | HellaSwag (acc_norm) |" in text
    assert ["**" in line for line in text.splitlines() if line.startswith(("| A", "| B"))] == [False, True, True, False]
    assert r"| A\|PC | **0.4000**" in text


def test_partial_results_say_so(tmp_path):
    text, rows = written([result("A", 1.0, error=None, limit=1)], ["piqa", "boolq"], tmp_path)
    assert "PARTIAL: only the first 1 items" in text
    assert "Not the paper's average" in text and "Average of 2" in text
    assert "| A | 1.0000 | 1.0000 | 1.0000 |" in text  # one item has no error
    assert {row["limit"] for row in rows.values()} == {"1"}


def test_bold_is_a_lead_beyond_a_paired_standard_error(tmp_path):
    """A lead of 2 of 20 items, 0.1, exceeds the error of the difference, 0.069, if one model is right wherever the other is;
    with 4 items won and 2 lost it does not: the error is 0.124."""

    def of(name, hits):
        task = {"acc": hits.count("1") / 20, "acc_stderr": 0.1, "items": 20, "acc_of_items": hits}
        return {"name": name, "limit": None, "tasks": {"piqa": task}}

    base, nested, crossed = "1" * 10 + "0" * 10, "1" * 12 + "0" * 8, "0" * 2 + "1" * 12 + "0" * 6
    for other, is_bold in ((nested, True), (crossed, False), ("", False)):
        results = [of("A", base), of("B", other)]
        results[1]["tasks"]["piqa"]["acc"] = 0.6
        text, _ = written(results, ["piqa"], tmp_path)
        assert ("**0.6000**" in text, "**0.5000**" in text) == (is_bold, False)
    errors = tables.paired_errors(of("A", base), of("B", nested), ["piqa"])
    assert errors == [pytest.approx(0.3078 / 20**0.5, abs=1e-4)] * 2


def test_a_task_beside_the_papers_is_not_in_the_papers_average(tmp_path, monkeypatch):
    monkeypatch.setitem(tables.METRICS, "sciq", "acc")
    monkeypatch.setitem(tables.SHORT_NAMES, "sciq", "SciQ")
    for names, is_papers in (([*PAPERS], True), ([*PAPERS, "sciq"], False), ([*PAPERS[:8]], False)):
        text, _ = written([result("A", 0.2)], names, tmp_path)
        assert ("Not the paper's average" in text) != is_papers

"""Averages, errors, marks: against numbers computed by hand."""

import csv

from matplotlib.text import Text

from pc.evaluate import tables
from pc.evaluate.tasks import METRICS


def result(name, value, error=0.03, limit=None):
    task = {"acc": value, "acc_stderr": error, "acc_norm": value / 2, "acc_norm_stderr": error, "items": 10}
    return {"name": name, "limit": limit, "tasks": {task_name: dict(task) for task_name in METRICS}}


def test_four_models_in_pairs(tmp_path):
    results = [result("A", 0.2), result("A + PC", 0.4), result("B", 0.6), result("B + PC", 0.5)]
    written = tables.write(results, list(METRICS), tmp_path / "table")
    assert {path.suffix for path in written} == {".md", ".csv", ".png"}
    assert all(path.stat().st_size for path in written)
    rows = {(row["model"], row["task"]): row for row in csv.DictReader((tmp_path / "table.csv").open())}
    assert rows["A", "piqa"]["value"] == "0.2" and rows["A", "hellaswag"]["value"] == "0.1"  # acc_norm
    # five tasks with acc, four with acc_norm, which is half of it here
    assert abs(float(rows["B", "average"]["value"]) - (5 * 0.6 + 4 * 0.3) / 9) < 1e-12
    assert abs(float(rows["B", "average"]["standard_error"]) - 0.03 / 3) < 1e-12
    assert [rows[name, "piqa"]["best_of_pair"] for name in ("A", "A + PC", "B", "B + PC")] == [
        "0",
        "1",
        "1",
        "0",
    ]
    assert {row["partial"] for row in rows.values()} == {"0"}
    text = (tmp_path / "table.md").read_text()
    assert "PARTIAL" not in text and "Not the paper's average" not in text
    assert "**0.4000** ± 0.0300" in text and "**0.5000**" not in text


def test_partial_results_say_so(tmp_path):
    tables.write([result("A", 0.2, limit=5)], ["piqa", "boolq"], tmp_path / "table")
    text = (tmp_path / "table.md").read_text()
    assert "PARTIAL: only the first 5 items" in text
    assert "Not the paper's average" in text and "Average of 2" in text
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert {row["partial"] for row in rows} == {"1"}


def test_another_text_is_named(tmp_path):
    results = [result("A", 0.2), result("B", 0.3)]
    for one in results:
        one["tasks"]["lambada_openai"]["variant"] = "text without line breaks"
    tables.write(results, list(METRICS), tmp_path / "table")
    text = (tmp_path / "table.md").read_text()
    assert "| LAMBADA, text without line breaks (acc) | HellaSwag (acc_norm) |" in text
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert {row["task"] for row in rows if row["variant"]} == {"lambada_openai"}


def test_one_item_has_no_error(tmp_path):
    tables.write([result("A", 1.0, error=None)], ["piqa"], tmp_path / "table")
    assert "| A | 1.0000 | 1.0000 |" in (tmp_path / "table.md").read_text()


def test_marks():
    rows = [{"x": (value, None)} for value in (0.1, 0.3, 0.3)]
    assert tables.best_of_each_pair(rows, "x") == {1, 2}  # an odd number is one group
    assert tables.best_of_each_pair(rows[1:], "x") == set()  # equal: none is better
    assert tables.best_of_each_pair(rows[:1], "x") == set()


def test_the_title_of_few_tasks_is_whole(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(tables.plots, "save", lambda figure, path: drawn.append(figure) or path)
    tables.write([result("A", 0.2, limit=5), result("B", 0.2, limit=5)], ["piqa"], tmp_path / "table")
    (figure,) = drawn
    figure.draw_without_rendering()
    (box,) = (text.get_window_extent() for text in figure.findobj(Text) if "Zero-shot" in text.get_text())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_bar_in_a_name_stays_in_its_cell(tmp_path):
    tables.write([result("A|B", 0.2)], ["piqa"], tmp_path / "table")
    assert r"| A\|B | 0.2000 ± 0.0300 |" in (tmp_path / "table.md").read_text()

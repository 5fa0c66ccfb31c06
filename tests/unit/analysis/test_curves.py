import json
import math

import pandas as pd
import pytest

from pc.analysis import curves
from pc.analysis.figures import draw_curves, draw_sweeps
from pc.common.plots import save
from pc.common.run_folder import read_log, read_logs
from pc.errors import UserError
from pc.sweep import bars


def _write(folder, lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _validations(folder, losses, tokens_per_step=100):
    return _write(
        folder,
        [{"step": i + 1, "tokens": (i + 1) * tokens_per_step, "validation_loss": v} for i, v in enumerate(losses)],
    )


def test_tokens_to_reach_interpolates():
    course = pd.Series([5.0, 4.0, 3.5], [100, 200, 300])
    assert curves.tokens_to_reach(course, 4.0) == 200
    assert curves.tokens_to_reach(course, 4.25) == 175
    assert curves.tokens_to_reach(course, 6.0) == 100  # before the first validation nothing is known
    assert math.isnan(curves.tokens_to_reach(course, 3.4))
    # the first time counts, also when the loss rises again
    assert curves.tokens_to_reach(pd.Series([5.0, 3.0, 4.0], [100, 200, 300]), 4.0) == 150
    # nothing is interpolated from a loss that is not finite
    assert curves.tokens_to_reach(pd.Series([5.0, math.nan, 3.0], [100, 200, 300]), 4.0) == 300


def test_speedup_both_ways_and_neither(tmp_path):
    reference = _validations(tmp_path / "reference", [5.0, 4.0, 3.0])
    better = _validations(tmp_path / "better", [4.0, 3.0, 2.5])
    worse = _validations(tmp_path / "worse", [5.5, 4.5, 4.0])
    rows = curves.compare(read_logs([reference, better, worse]))
    assert rows.speedup.tolist() == [1.0, 300 / 200, 200 / 300]
    assert rows.reached_at_tokens.tolist() == pytest.approx([300, 200, math.nan], nan_ok=True)
    assert rows.difference.tolist() == [0, -0.5, 1.0]
    text = curves.table(rows)
    assert "1.50x" in text and "never" in text and "different numbers of tokens" not in text
    assert "different numbers of tokens" in curves.table(
        curves.compare(read_logs([reference, _validations(tmp_path / "short", [4.0, 2.9])]))
    )


def test_a_short_run_that_never_gets_there_has_no_speedup(tmp_path):
    """Its high loss is one that the reference has only before, or in, its first validations."""
    reference = _validations(tmp_path / "reference", [5.0, 4.0, 3.0])
    short = _validations(tmp_path / "short", [9.0, 8.0], tokens_per_step=10)
    between = _validations(tmp_path / "between", [4.9], tokens_per_step=105)
    longer = _validations(tmp_path / "longer", [4.9], tokens_per_step=150)
    rows = curves.compare(read_logs([reference, short, between, longer]))
    assert rows.reached_at_tokens[1:].isna().all()
    assert rows.speedup.tolist() == pytest.approx([1.0, math.nan, math.nan, 110 / 150], nan_ok=True)
    assert "| never | - |" in curves.table(rows)


def test_last_line_of_a_step_wins_and_null_is_nan(tmp_path):
    lines = [{"step": s, "tokens": s, "loss": float(s)} for s in (1, 2, 3)]
    lines += [{"step": 2, "tokens": 2, "loss": 9.0}, {"step": 3, "tokens": 3, "loss": None}]
    folder = _write(tmp_path / "run", lines)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # a crash
    series = read_log(folder).series("loss")
    assert series.steps == [1, 2, 3] and series.values[:2] == [1.0, 9.0] and series.values[2] != series.values[2]


@pytest.mark.parametrize("content", ["", '{"step": 1, "tokens": 10, "loss": 3.0}\n'])
def test_a_run_without_validation_is_named(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match="metrics.jsonl: no 'validation_loss' was logged"):
        curves.compare([read_log(tmp_path)])


def test_names_of_runs(tmp_path):
    runs = [_validations(tmp_path / of / "run", [3.0]) for of in ("adamw", "muon")]
    assert [run.name for run in read_logs([*runs, runs[0]])] == ["adamw/run", "muon/run"]


def test_bars(tmp_path, monkeypatch):
    results = [
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn", "o"]}, "validation_loss": 3.0, "spikes": 0},
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.1, "spikes": 2},
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.2, "spikes": 0},
        {"config": "b.toml", "settings": {"optimizer.lr": 3e-4}, "validation_loss": 2.9, "spikes": 0},
        {"config": "b.toml", "settings": {"optimizer.lr": 4e-4}, "validation_loss": None, "spikes": 1},
        {"config": "c.toml", "settings": {}, "validation_loss": None, "spikes": 1},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    usable = bars.read_results(tmp_path)
    drawn = []
    monkeypatch.setattr(bars, "save", lambda figure, path: drawn.append(figure) or save(figure, path))
    assert bars.plot(usable, tmp_path / "bars").stat().st_size > 5000
    texts = {text.get_text() for axes in drawn[0].axes for text in axes.texts}
    assert {"3.1500", "3.0000"} <= texts  # mean over seeds
    assert "1 of 1 without a loss" in texts
    baseline = read_log(_validations(tmp_path / "baseline", [3.3]))
    with pytest.raises(UserError, match="3 needed"):
        bars.plot(usable, tmp_path / "bars", [baseline])
    with pytest.raises(UserError, match="results.jsonl"):
        bars.read_results(tmp_path / "baseline")


def test_a_run_that_diverged(tmp_path):
    """summary.json is JSON, which has no NaN."""
    good, bad = _validations(tmp_path / "good", [5.0, 4.0]), _validations(tmp_path / "bad", [5.0, None])
    draw_curves([good, bad], tmp_path / "out")

    def refuse(constant):
        raise AssertionError(constant)

    first, second = json.loads((tmp_path / "out" / "summary.json").read_text(), parse_constant=refuse)
    assert first["final_loss"] == 4.0 and second["final_loss"] is None and second["name"] == "bad"


def test_sweeps_of_one_name_have_a_figure_each(tmp_path, capsys):
    line = {"config": "a.toml", "settings": {"pc.level": 1}, "validation_loss": 3.0, "spikes": 0}
    folders = [_write(tmp_path / of / "lr", []) for of in ("adamw", "muon")]
    for folder in folders:
        (folder / "results.jsonl").write_text(json.dumps(line) + "\n")
    draw_sweeps(folders, [], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bars_adamw-lr.png", "bars_muon-lr.png"]
    assert "bars_adamw-lr.png" in capsys.readouterr().out

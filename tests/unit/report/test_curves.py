import json
import math

import pandas as pd
import pytest

from helpers.made_runs import validations, write_run
from pc.errors import UserError
from pc_recipe.files.plots import save
from pc_recipe.files.run_log import read_log, read_logs
from pc_recipe.report import curves
from pc_recipe.report.figures import draw_curves, draw_sweeps
from pc_recipe.runs.sweep import points


def _compare(folder, **runs):
    """Of {name: validation losses, after every 100 tokens or as (tokens, losses)}."""
    given = {name: losses if isinstance(losses, tuple) else (100, losses) for name, losses in runs.items()}
    paths = [write_run(folder / name, validations(losses, tokens)) for name, (tokens, losses) in given.items()]
    return curves.compare(read_logs(paths))


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
    rows = _compare(tmp_path, reference=[5.0, 4.0, 3.0], better=[4.0, 3.0, 2.5], worse=[5.5, 4.5, 4.0])
    assert rows.speedup.tolist() == [1.0, 300 / 200, 200 / 300]
    assert rows.reached_at_tokens.tolist() == pytest.approx([300, 200, math.nan], nan_ok=True)
    assert rows.difference.tolist() == [0, -0.5, 1.0]
    text = curves.table(rows)
    assert "1.50x" in text and "never" in text and "different numbers of tokens" not in text
    shorter = _compare(tmp_path, reference=[5.0, 4.0, 3.0], short=[4.0, 2.9])
    assert "different numbers of tokens" in curves.table(shorter)


@pytest.mark.parametrize("lines", [[], [{"step": 1, "tokens": 10, "loss": 3.0}]])
def test_a_run_without_validation_is_named(tmp_path, lines):
    with pytest.raises(UserError, match="metrics.jsonl: no 'validation_loss' was logged"):
        draw_curves([write_run(tmp_path, lines)], tmp_path)


def test_points_of_sweeps(tmp_path, monkeypatch):
    results = [
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn", "o"]}, "validation_loss": 3.0, "spikes": 0},
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.1, "spikes": 2},
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.2, "spikes": 0},
        {"config": "b.toml", "settings": {"optimizer.lr": 3e-4}, "validation_loss": 2.9, "spikes": 0},
        {"config": "c.toml", "settings": {}, "validation_loss": None, "spikes": 1},
    ]
    drawn = []
    monkeypatch.setattr(points, "save", lambda figure, path: drawn.append(figure) or save(figure, path))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep_earlier.png").touch()
    for folder in (tmp_path / "adamw" / "lr", tmp_path / "muon" / "lr"):
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    draw_sweeps([tmp_path / "adamw" / "lr", tmp_path / "muon" / "lr"], [], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["sweep_adamw-lr.png", "sweep_muon-lr.png"]
    texts = {text.get_text() for axes in drawn[0].axes for text in axes.texts}
    assert {"3.1500", "3.0000", "no loss:\n1 of 1"} <= texts  # mean over seeds
    baseline = read_log(write_run(tmp_path / "baseline", validations([3.3])))
    with pytest.raises(UserError, match="3 needed"):
        points.plot(results, tmp_path / "points", [baseline])
    with pytest.raises(UserError, match="results.jsonl"):
        points.read_results(tmp_path / "baseline")


def pair(folder, **data):
    """Two runs, the second of which knows other checksums of its data, or none."""
    runs = [write_run(folder / name, validations([5.0, 4.0])) for name in ("one", "two")]
    content = {"content of data.path": "a", "content of data.validation_path": "v"}
    for run, changed in zip(runs, ({}, data), strict=True):
        (run / "environment.json").write_text(json.dumps({"data": content | changed}))
    return runs


def test_runs_with_other_validation_data_or_tokenizers_are_not_compared(tmp_path):
    """The checksum is of all that made the shards, the tokenizer too."""
    runs = pair(tmp_path, **{"content of data.validation_path": "w"})
    with pytest.raises(
        UserError, match="two was validated on other text than .*one, or with another tokenizer"
    ) as raised:
        draw_curves(runs, tmp_path / "out")
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()
    (runs[1] / "environment.json").write_text("{")  # a run of an earlier version, or a damaged file: nothing is known
    draw_curves(runs, tmp_path / "out")


@pytest.mark.parametrize("content, mark", [("b", " (other data)"), ("a", "")])
def test_runs_with_other_training_data_are_marked(tmp_path, capsys, content, mark):
    draw_curves(pair(tmp_path, **{"content of data.path": content}), tmp_path / "out")
    assert (
        f"| two{mark} | 2 |" in capsys.readouterr().out and "| one | 2 |" in (tmp_path / "out/summary.md").read_text()
    )


def test_figures_of_an_earlier_comparison_go(tmp_path, capsys):
    """Those that this one has nothing for; nothing else in the folder."""
    for name in ("estimator_error.png", "training_loss.png", "own.png"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).touch()
    draw_curves(pair(tmp_path), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "own.png",
        "summary.md",
        "validation_loss.png",
    ]
    assert "no training_loss.png: " in capsys.readouterr().out


def test_time_is_that_of_the_steps_alone(tmp_path, monkeypatch):
    """Logged every second step, and for a third of an hour each; the run was interrupted, and repeated step 4."""
    steps = [(2, 600.0), (4, 1000.0), (4, 600.0), (6, 600.0)]
    lines = [
        {"step": step, "tokens": 10 * step, "time": 1e6 * step, "loss": 9.0 - step, "step_seconds": seconds}
        for step, seconds in steps
    ]
    lines += [{"step": step, "tokens": 10 * step, "validation_loss": 8.0 - step} for step in (3, 6)]
    runs = [write_run(tmp_path / name, lines) for name in ("one", "two")]
    (runs[1] / "environment.json").write_text(json.dumps({"gpus": ["Card"]}))
    drawn = {}
    monkeypatch.setattr(curves, "save", lambda figure, path: drawn.update({path.name: figure}) or save(figure, path))
    draw_curves(runs, tmp_path / "out")
    by_tokens, by_hours = drawn["training_loss"].axes
    assert list(by_tokens.lines[0].get_xdata()) == [20, 40, 60]
    assert list(by_hours.lines[0].get_xdata()) == pytest.approx([1 / 3, 2 / 3, 1])
    assert list(by_hours.lines[0].get_ydata()) == [7.0, 5.0, 3.0]
    (validated,) = drawn["validation_loss_by_time"].axes
    assert list(validated.lines[0].get_xdata()) == pytest.approx([1 / 2, 1])
    assert validated.get_xlabel() == "hours of training steps, on different machines"

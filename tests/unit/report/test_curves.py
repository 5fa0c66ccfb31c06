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
from pc_recipe.runs.sweep import bars


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


def test_bars(tmp_path, monkeypatch):
    results = [
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn", "o"]}, "validation_loss": 3.0, "spikes": 0},
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.1, "spikes": 2},
        {"config": "a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.2, "spikes": 0},
        {"config": "b.toml", "settings": {"optimizer.lr": 3e-4}, "validation_loss": 2.9, "spikes": 0},
        {"config": "c.toml", "settings": {}, "validation_loss": None, "spikes": 1},
    ]
    drawn = []
    monkeypatch.setattr(bars, "save", lambda figure, path: drawn.append(figure) or save(figure, path))
    for folder in (tmp_path / "adamw" / "lr", tmp_path / "muon" / "lr"):
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    draw_sweeps([tmp_path / "adamw" / "lr", tmp_path / "muon" / "lr"], [], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bars_adamw-lr.png", "bars_muon-lr.png"]
    texts = {text.get_text() for axes in drawn[0].axes for text in axes.texts}
    assert {"3.1500", "3.0000", "1 of 1\nwithout a loss"} <= texts  # mean over seeds
    baseline = read_log(write_run(tmp_path / "baseline", validations([3.3])))
    with pytest.raises(UserError, match="3 needed"):
        bars.plot(results, tmp_path / "bars", [baseline])
    with pytest.raises(UserError, match="results.jsonl"):
        bars.read_results(tmp_path / "baseline")

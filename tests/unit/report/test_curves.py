import json
import math
import re

import pandas as pd
import pytest
from matplotlib.figure import Figure

from helpers.made_runs import validations, write_run
from pc.errors import UserError
from pc_recipe.files.run_log import read_logs
from pc_recipe.pages.plots import short_tokens
from pc_recipe.report import curves, run_page
from pc_recipe.runs.sweep import points


@pytest.mark.parametrize(
    "number, short",
    [(999_948_288, "1 B"), (999_700, "1 M"), (999_400, "999 k"), (2_621_440, "2.62 M"), (999, "999"), (1_000, "1 k")],
)
def test_a_short_number_has_the_unit_of_what_it_is_rounded_to(number, short):
    assert short_tokens(number) == short


def _compare(folder, **runs):
    """Compare runs {name: validation losses, after every 100 tokens or as (tokens, losses)}."""
    given = {name: losses if isinstance(losses, tuple) else (100, losses) for name, losses in runs.items()}
    paths = [write_run(folder / name, validations(losses, tokens)) for name, (tokens, losses) in given.items()]
    return curves.compare(read_logs(paths))


def page_of(runs, sweeps=()):
    output = (runs or sweeps)[0].parent / "page.html"
    run_page.write(runs, output, sweeps)
    return output.read_text()


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
    page = page_of([tmp_path / name for name in ("reference", "better", "worse")])
    assert "1.50x" in page and "never" in page and "different numbers of tokens" not in page
    again = _compare(tmp_path, reference=[3.0, 1.8, 2.2], other=[3.0, 1.8, 2.2])  # both had their final loss earlier
    assert again.speedup.tolist() == [1.0, 1.0]
    _compare(tmp_path, reference=[5.0, 4.0, 3.0], short=[4.0, 2.9])
    assert "different numbers of tokens" in page_of([tmp_path / "reference", tmp_path / "short"])


def test_a_run_without_validation_is_named(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: no 'validation_loss' was logged"):
        page_of([write_run(tmp_path / "run", [{"step": 1, "tokens": 10, "loss": 3.0}])])


def test_points_of_sweeps(tmp_path):
    results = [
        {"config": "adamw/a.toml", "settings": {"pc.blocks": ["ffn", "o"]}, "validation_loss": 3.0, "spikes": 0},
        {"config": "adamw/a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.1, "spikes": 2},
        {"config": "adamw/a.toml", "settings": {"pc.blocks": ["ffn"]}, "validation_loss": 3.2, "spikes": 0},
        {"config": "adamw/b.toml", "settings": {"optimizer.lr": 3e-4}, "validation_loss": 2.9, "spikes": 0},
        {"config": "muon/b.toml", "settings": {}, "validation_loss": None, "spikes": 1},
    ]
    folders = tmp_path / "adamw" / "lr", tmp_path / "muon" / "lr"
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    page = page_of([], folders)
    assert re.findall("<h2>(.*?)</h2>", page) == ["Sweep adamw/lr", "Sweep muon/lr"] and page.count("<svg") == 6
    assert all(f">{text}<" in page for text in ("3.1500", "3.0000", "1 of 1"))  # mean over seeds; runs without a loss
    baselines = [write_run(tmp_path / name, validations([3.3])) for name in ("one", "two", "three")]
    page = page_of(baselines, folders[:1])
    assert ">two, 3.3000<" in page and "<h2>Losses</h2>" in page
    with pytest.raises(UserError, match="1 runs given with .* 3 needed: one for each of adamw/a, adamw/b, muon/b"):
        page_of(baselines[:1], folders)
    with pytest.raises(UserError, match="results.jsonl"):
        points.read_results(tmp_path / "one")


def pair(folder, **data):
    """Two runs; `data` changes checksums that the second has of its data."""
    runs = [write_run(folder / name, validations([5.0, 4.0])) for name in ("one", "two")]
    content = {"content of data.path": "a", "content of data.validation_path": "v"}
    for run, changed in zip(runs, ({}, data), strict=True):
        (run / "environment.json").write_text(json.dumps({"data": content | changed}))
    return runs


def test_runs_with_other_validation_data_or_tokenizers_are_not_compared(tmp_path):
    """The checksum covers everything that made the shards, including the tokenizer."""
    runs = pair(tmp_path, **{"content of data.validation_path": "w"})
    with pytest.raises(
        UserError, match="two was validated on other text than .*one, or with another tokenizer"
    ) as raised:
        page_of(runs)
    assert "\n" not in str(raised.value) and not (tmp_path / "page.html").exists()
    environment = json.loads((runs[1] / "environment.json").read_text())
    one = json.loads((runs[0] / "environment.json").read_text())
    (runs[1] / "environment.json").write_text(json.dumps(one | {"earlier": [environment]}))
    with pytest.raises(UserError, match="two was validated on other text"):  # also in an earlier part of the run
        page_of(runs)
    (runs[1] / "environment.json").write_text("{")  # a run of an earlier version, or a damaged file: nothing is known
    page_of(runs)


def test_points_that_cannot_be_compared_are_not_drawn(tmp_path):
    """Of a sweep's runs, and of the run that is drawn as its line. Results of an earlier version do not name folders."""
    one, two = pair(tmp_path, **{"content of data.validation_path": "w"})
    sweep = tmp_path / "sweep"
    sweep.mkdir()

    def collect(*runs, key="folder", loss=3.0):
        results = [{"config": "a.toml", "settings": {}, "validation_loss": loss, key: str(run)} for run in runs]
        (sweep / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))

    collect(one, two)
    with pytest.raises(UserError, match="two was validated on other text than .*one"):
        page_of([], [sweep])
    collect(one)
    with pytest.raises(UserError, match="two was validated on other text than .*one"):
        page_of([two], [sweep])
    assert ">one, 4.0000<" in page_of([one], [sweep])
    collect(one, two, loss=None)
    assert ">2 of 2<" in page_of([], [sweep])
    collect(one, two, key="place")
    assert ">3.0000<" in page_of([], [sweep])


@pytest.mark.parametrize("content, mark", [("b", " (other data)"), ("a", "")])
def test_runs_with_other_training_data_are_marked(tmp_path, content, mark):
    page = page_of(pair(tmp_path, **{"content of data.path": content}))
    assert f"<td>two{mark}</td><td>2</td>" in page and "<td>one</td><td>2</td>" in page


def test_what_was_not_logged_is_reported(tmp_path):
    page = page_of(pair(tmp_path))
    assert "no &#x27;loss&#x27; was logged" in page and "set [diagnostics] freq above 0" in page


def test_time_is_that_of_training_steps_only(tmp_path):
    """Every second step is logged, and two steps take a third of an hour; the run was interrupted and repeated step 4."""
    steps = [(2, 600.0), (4, 1000.0), (4, 600.0), (6, 600.0)]
    lines = [
        {"step": step, "tokens": 10 * step, "time": 1e6 * step, "loss": 9.0 - step, "step_seconds": seconds}
        for step, seconds in steps
    ]
    lines += [{"step": step, "tokens": 10 * step, "validation_loss": 8.0 - step} for step in (3, 6)]
    runs = [write_run(tmp_path / name, lines) for name in ("one", "two")]
    (runs[1] / "environment.json").write_text(json.dumps({"gpus": ["Card"]}))
    axes = Figure().subplots()
    curves.draw_training(axes, read_logs(runs))
    assert list(axes.lines[0].get_xdata()) == [20, 40, 60]
    axes = Figure().subplots()
    curves.draw_training(axes, read_logs(runs), by_time=True)
    assert list(axes.lines[0].get_xdata()) == pytest.approx([1 / 3, 2 / 3, 1])
    assert list(axes.lines[0].get_ydata()) == [7.0, 5.0, 3.0]
    axes = Figure().subplots()
    curves.draw_validation_over_time(axes, read_logs(runs))
    assert list(axes.lines[0].get_xdata()) == pytest.approx([1 / 2, 1])
    assert axes.get_xlabel() == "hours of training steps, on different machines"
    page = page_of(runs)
    assert page.count("against time") == 2

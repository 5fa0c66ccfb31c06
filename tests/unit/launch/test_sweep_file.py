"""A sweep's TOML becomes a list of runs, or one clear line."""

import json
import math

import pytest

from pc.errors import UserError
from pc.launch.sweep import begin, geometric_grid, load, plan_text
from pc.titan.config import JobConfig
from pc.titan.resolve import resolve


@pytest.fixture
def sweep_file(tmp_path, monkeypatch):
    """Writes a config and a sweep over it; the working directory is their folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(
        "[training]\nseq_len = 32\nlocal_batch_size = 2\nglobal_batch_size = 4\nsteps = 5\n"
    )

    def write(text: str):
        path = tmp_path / "sweep.toml"
        path.write_text(text)
        return path

    return write


def test_product_of_configs_axes_and_seeds(sweep_file, tmp_path):
    (tmp_path / "other.toml").write_text('parent = "tiny.toml"\n')
    sweep = load(
        sweep_file(
            'configs = ["tiny.toml", "other.toml"]\nseeds = [3, 4]\n'
            '[axes]\n"optimizer.lr" = [1e-3, 2e-3]\n"pc.blocks" = [["o"], ["o", "ffn"]]\n'
        )
    )
    assert len(sweep.runs) == 2 * 2 * 2 * 2
    run = sweep.runs[-1]
    assert run.name == "other/lr-0.002_blocks-o+ffn/seed-4"
    assert run.setting_name == "other/lr-0.002_blocks-o+ffn"
    values = resolve(run.config, run.overrides, JobConfig)
    assert values["optimizer"]["lr"] == 2e-3 and values["pc"]["blocks"] == ["o", "ffn"]
    assert values["debug"]["seed"] == values["data"]["seed"] == 4
    assert values["job"]["dump_folder"] == str(run.folder) == "outputs/sweeps/sweep/" + run.name


@pytest.mark.parametrize("value", ['"polar_express"', "3", '{ o = 4, ffn = "polar_express" }'])
def test_values_of_any_type_reach_the_run(sweep_file, value):
    sweep = load(sweep_file(f'configs = ["tiny.toml"]\n[axes]\n"pc.level" = [{value}]\n'))
    (run,) = sweep.runs
    assert resolve(run.config, run.overrides, JobConfig)["pc"]["level"] == run.settings["pc.level"]


def test_geometric_grid_is_spaced_by_its_factor():
    grid = geometric_grid(3e-4, 3.394e-3, math.sqrt(2), "here")
    assert len(grid) == 8
    for below, above in zip(grid, grid[1:], strict=False):
        assert above / below == pytest.approx(math.sqrt(2), rel=1e-3)  # four digits are kept


def test_geometric_grid_of_one_value():
    assert geometric_grid(0.5, 0.5, 2.0, "here") == [0.5]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "configs names no config"),
        ('configs = ["gone.toml"]', "gone.toml: no such file"),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = []', 'axes."optimizer.lr" has no values'),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 1.0 }', "first, last, factor"),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 1.0, last = 3.0, factor = 2 }',
            "near it are 4 or 8",
        ),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 2.0, last = 1.0 }',
            "0 < first <= last",
        ),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 1.0, last = 2.0, factor = 1 }',
            "factor > 1",
        ),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lt" = [1.0]', "did you mean optimizer.lr"),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = ["fast"]',
            "optimizer.lr = 'fast' should be a number",
        ),
        ('configs = ["tiny.toml"]\n[axes]\noptimizer.lr = [1.0]', "axes"),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = [1.0, 1.0]', "two runs have the same name"),
        ('configs = ["tiny.toml"]\nsedes = [1]', "did you mean seeds"),
        (
            'configs = ["tiny.toml"]\n[select]\nspike_margin = -1.0',
            "select.spike_margin = -1.0 should be above 0",
        ),
        ('parent = "sweep.toml"', "cycle"),
    ],
)
def test_bad_sweeps_say_what_is_wrong(sweep_file, text, said):
    with pytest.raises(UserError) as raised:
        load(sweep_file(text))
    assert said in str(raised.value)
    assert "sweep.toml" in str(raised.value) and "\n" not in str(raised.value)


def test_plan_counts_tokens_and_gpu_hours(sweep_file):
    sweep = load(sweep_file('configs = ["tiny.toml"]\n[axes]\n"training.steps" = [5, 10]\n'))
    lines = plan_text(sweep, 1, tokens_per_second=0.1).splitlines()
    assert len(lines) == 3
    # 15 steps x 4 sequences x 32 tokens at 0.1 tokens per second
    assert lines[-1].split()[-2] == f"{15 * 4 * 32 / 0.1 / 3600:.2f}"


def test_a_changed_sweep_is_refused_in_the_same_folder(sweep_file, tmp_path):
    path = sweep_file('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = [1e-3]\n')
    plan = json.loads(begin(load(path)).read_text())
    assert [run["name"] for run in plan["runs"]] == ["lr-0.001"]
    begin(load(path))  # the same again is welcome
    config = tmp_path / "tiny.toml"
    text = config.read_text()
    config.write_text(text + "[data]\nseed = 3\n")
    with pytest.raises(UserError, match="tiny.toml changed since the sweep"):
        begin(load(path))
    config.write_text(text)
    with pytest.raises(UserError, match="sweep.toml changed since the sweep"):
        begin(load(sweep_file('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = [1e-3, 2e-3]\n')))

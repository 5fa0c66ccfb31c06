"""A sweep's TOML becomes a list of runs, or one clear line."""

import json
import math

import pytest

from pc.errors import UserError
from pc.settings import load_config
from pc.sweep.spec import begin, geometric_grid, load


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
    values = load_config(run.config, run.overrides).model_dump()
    assert values["optimizer"]["lr"] == 2e-3 and values["pc"]["blocks"] == ["o", "ffn"]
    assert values["debug"]["seed"] == values["data"]["seed"] == 4
    assert values["job"]["dump_folder"] == str(run.folder) == "outputs/sweeps/sweep/" + run.name


@pytest.mark.parametrize("value", ['"polar_express"', "3", '{ o = 4, ffn = "polar_express" }'])
def test_values_of_any_type_reach_the_run(sweep_file, value):
    sweep = load(sweep_file(f'configs = ["tiny.toml"]\n[axes]\n"pc.level" = [{value}]\n'))
    (run,) = sweep.runs
    assert load_config(run.config, run.overrides).pc.level == run.settings["pc.level"]


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
        ('configs = ["gone.toml"]', "gone.toml: No such file"),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = []',
            "axes.optimizer.lr = [] should have at least 1 item",
        ),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 1.0 }', "should be a valid list or have last"),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 1.0, last = 3.0, factor = 2 }',
            "the nearest points are 4 or 8",
        ),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 2.0, last = 1.0 }',
            "axes.optimizer.lr.last = 1.0 is not on the grid; the nearest points are 2 or 2.8",
        ),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 1.0, last = 2.0, factor = 1 }',
            "should be a valid list or greater than or equal to 1.01",
        ),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lt" = [1.0]', "did you mean optimizer.lr"),
        (
            'configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = ["fast"]',
            "optimizer.lr = 'fast' should be a valid number",
        ),
        ('configs = ["tiny.toml"]\n[axes]\noptimizer.lr = [1.0]', "axes"),
        ('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = [1.0, 1.0]', "two runs have the same name"),
        (
            'configs = ["tiny.toml"]\nseeds = [0]\n[axes]\n"data.seed" = [3, 4]',
            "data.seed is set by the sweep itself",
        ),
        ('configs = ["tiny.toml"]\n[axes]\n"job.dump-folder" = ["a", "b"]', "job.dump_folder is set by"),
        ('configs = ["tiny.toml"]\nsedes = [1]', "did you mean seeds"),
        (
            'configs = ["tiny.toml"]\n[select]\nspikes_allowed = -1',
            "select.spikes_allowed = -1 should be greater than",
        ),
        ('parent = "sweep.toml"', "cycle"),
    ],
)
def test_bad_sweeps_say_what_is_wrong(sweep_file, text, said):
    with pytest.raises(UserError) as raised:
        load(sweep_file(text))
    assert said in str(raised.value)
    assert "sweep.toml" in str(raised.value) and "\n" not in str(raised.value)


def test_a_grid_takes_the_configs_own_value_where_it_lies_on_it(sweep_file, tmp_path):
    """Published grids are rounded: 8.485e-4 and 8.486e-4 are meant to be one learning rate, and one run."""
    with open(tmp_path / "tiny.toml", "a") as config:
        config.write("[optimizer]\nlr = 8.486e-4\n")
    sweep = load(sweep_file('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = { first = 3.0e-4, last = 3.394e-3 }\n'))
    rates = [run.settings["optimizer.lr"] for run in sweep.runs]
    assert rates == [3e-4, 4.243e-4, 6e-4, 8.486e-4, 1.2e-3, 1.697e-3, 2.4e-3, 3.394e-3]


def test_runs_keep_their_place_in_the_list(sweep_file):
    """A job of an array knows its run by its place, and may still wait when the sweep grows."""
    begin(load(sweep_file('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = [2e-3, 4e-3]\n')))
    listed = json.loads(
        begin(load(sweep_file('configs = ["tiny.toml"]\n[axes]\n"optimizer.lr" = [1e-3, 4e-3]\n'))).read_text()
    )
    assert [run["name"] for run in listed["runs"]] == ["lr-0.002", "lr-0.004", "lr-0.001"]

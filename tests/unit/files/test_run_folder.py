"""What a run's folder says about the run."""

import json
import os

import pytest

from pc_recipe.files.run_folder import find_newest_step, list_runs, read_parts


def test_runs_are_found_while_another_process_deletes_a_checkpoint(tmp_path, monkeypatch):
    """A sweep looks for equal runs while other runs train."""
    gone, real = tmp_path / "one" / "checkpoint" / "step-1.purged", os.scandir
    gone.mkdir(parents=True)
    for run in ("one", "one/two"):
        (tmp_path / run).mkdir(exist_ok=True)
        (tmp_path / run / "config.toml").touch()

    def scandir(path):
        if path == str(gone):
            gone.rmdir()
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert list_runs(tmp_path) == [tmp_path / "one", tmp_path / "one" / "two"]
    assert not gone.exists()


def test_a_run_without_checkpoints_has_no_step_wherever_the_command_runs(tmp_path, monkeypatch):
    (tmp_path / "step-7").mkdir()
    monkeypatch.chdir(tmp_path / "step-7")
    assert find_newest_step(tmp_path / "run") == 0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"earlier": null}', '{"earlier": [1]}', '{"data": [1]}', '{"data": {"content of data.path": 1}}',
     '{"earlier": [{"data": [1]}]}', '{"gpus": "card"}'],
)  # fmt: skip
def test_a_damaged_environment_says_nothing(tmp_path, text):
    """Each start, report and sweep reads it."""
    (tmp_path / "environment.json").write_text(text)
    assert read_parts(tmp_path) == [{}]


def test_all_parts_of_an_environment_are_read(tmp_path):
    earlier = {"data": {"content of data.path": "one"}, "cpu": "AVX2"}
    content = {"data": {"content of data.path": "other"}, "gpus": ["card"], "world_size": 2, "earlier": [earlier]}
    (tmp_path / "environment.json").write_text(json.dumps(content))
    newest = {key: value for key, value in content.items() if key != "earlier"}
    assert read_parts(tmp_path) == [newest, earlier]

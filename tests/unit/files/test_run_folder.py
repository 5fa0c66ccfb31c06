"""What a run's folder says about the run."""

import json
import os

import pytest

from pc_recipe.files.run_folder import (
    find_newest_step,
    keep_earlier_config,
    list_configs,
    list_runs,
    read_first_config,
    read_parts,
)


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


def _resume_with(run, number):
    keep_earlier_config(run, {"training": {"steps": number}}, step=1)
    (run / "config.toml").write_text(f"[training]\nsteps = {number}\n")


def test_no_earlier_config_is_overwritten(tmp_path):
    """Also after one was removed."""
    for number in range(12):
        _resume_with(tmp_path, number)
    (tmp_path / "config.1.toml").unlink()
    before = {file.name: file.read_text() for file in list_configs(tmp_path)[1:]}
    _resume_with(tmp_path, 12)
    kept = {file.name: file.read_text() for file in list_configs(tmp_path)[1:]}
    assert list(kept) == [f"config.{number}.toml" for number in range(2, 13)]
    assert kept == before | {"config.12.toml": "[training]\nsteps = 11\n"}
    assert read_first_config(tmp_path) == {"training": {"steps": 1}}


@pytest.mark.parametrize("text", ["", "model = 5", "[model", "checkpoint = []", "\0"])
def test_a_config_of_another_form_says_nothing_and_is_kept(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    assert read_first_config(tmp_path) == {}
    _resume_with(tmp_path, 1)
    assert not text or (tmp_path / "config.1.toml").read_text() == text

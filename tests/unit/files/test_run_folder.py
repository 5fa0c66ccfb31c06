"""What a run's folder says of itself."""

from pc_recipe.files.run_folder import find_newest_step


def test_a_run_without_checkpoints_has_no_step_wherever_the_command_runs(tmp_path, monkeypatch):
    (tmp_path / "step-7").mkdir()
    monkeypatch.chdir(tmp_path / "step-7")
    assert find_newest_step(tmp_path / "run") == 0

"""Which checkpoint the batch script scores, without SLURM and without a score."""

import os
import subprocess
import sys

from helpers.tiny import ROOT
from pc_recipe.files.run_folder import parse_model


def _score(run, tmp_path):
    """The script's result; of its Python commands only the search runs, and the others are printed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[[ $1 == -* ]] && exec {sys.executable} "$@"\necho "$@"\n')
    python.chmod(0o755)
    words = ["bash", "scripts/slurm/score.sbatch", str(run)]
    environment = {**os.environ, "PC_PYTHON": str(python)}
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_the_newest_complete_step_n_is_scored(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoint"
    for name in ("step-9", "step-10", "step-40.bad", "best-step-50", "step-60"):
        (checkpoints / name).mkdir(parents=True)
        if name != "step-60":
            (checkpoints / name / ".metadata").touch()
    done = _score(tmp_path / "run", tmp_path)
    assert done.returncode == 0 and f"export_hf.py {checkpoints}/step-10 " in done.stdout, done


def test_a_folder_with_an_equals_sign_is_scored(tmp_path):
    """Sweeps make such names."""
    exported = tmp_path / "level-o=4+ffn=2" / "hugging_face" / "step-9"
    checkpoint = tmp_path / "level-o=4+ffn=2" / "checkpoint" / "step-9"
    for file in (checkpoint / ".metadata", exported / "config.json"):
        file.parent.mkdir(parents=True)
        file.touch()
    _, model, *_ = _score(tmp_path / "level-o=4+ffn=2", tmp_path).stdout.split()
    assert parse_model(model) == ("level-o-4+ffn-2", exported)


def test_an_older_export_of_the_same_step_is_not_scored(tmp_path):
    """The run went back to an earlier step and continued with other data."""
    exported = tmp_path / "run" / "hugging_face" / "step-9" / "config.json"
    index = tmp_path / "run" / "checkpoint" / "step-9" / ".metadata"
    for file in (index, exported):
        file.parent.mkdir(parents=True)
        file.touch()
    assert "export_hf.py" not in _score(tmp_path / "run", tmp_path).stdout
    os.utime(exported, (0, 0))
    # that command will fail because the folder exists, which ends the job
    assert f"export_hf.py {index.parent} {exported.parent}" in _score(tmp_path / "run", tmp_path).stdout


def test_a_run_without_a_checkpoint_is_a_one_line_error(tmp_path):
    done = _score(tmp_path, tmp_path)
    assert done.returncode and not done.stdout and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1

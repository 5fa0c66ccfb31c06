"""The data commands as a user runs them: divided among the tasks of a job array, inspected."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.tiny import ROOT
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizing import tokenize


def test_array_tasks_share_the_work_which_is_inspected(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parquet").mkdir()
    for number in range(6):
        pq.write_table(pa.table({"text": [f"document {number} {i}" for i in range(30)]}), f"parquet/{number}.parquet")
    for name, value in {"MIN": "10", "MAX": "13", "STEP": "3", "COUNT": "2"}.items():  # --array=10-13:3
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    files = sorted(map(str, Path("parquet").iterdir()))  # as the shell expands parquet/*.parquet
    words = ["--validation-fraction", "0.05", "--processes", "1", "--output", "array", "--input", *files]
    for task in ("10", "13"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        _, printed, _ = command("tokenize_text.py", *words)
        assert ("complete when all are" in printed) == (task == "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "20")  # as of --array=10,20
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", "1")
    status, _, error = command("tokenize_text.py", *words)
    assert status == 2 and "could have any share; give --array=0-1, or --part K/2" in error
    for name in ("ID", "MIN", "MAX"):  # as of --array=5
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")
    status, _, error = command("tokenize_text.py", *words)
    assert status == 2 and "could have any share; give --array=0-0, or --part K/1" in error
    alone = tokenize("parquet", tmp_path / "alone", validation_fraction=0.05)
    assert Manifest.read(tmp_path / "array").shards == alone.shards

    _, printed, _ = command("inspect_data.py", "array", "--documents", "2")
    for expected in ("mistral-common", "checksums    correct"):
        assert expected in printed
    assert re.search(r"\n(--- document of \d+ tokens ---\ndocument \d \d+\n*){2}$", printed)


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "at a line"])
def test_a_closed_pipe_ends_the_command_silently(unbuffered, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    (tmp_path / "a.txt").write_text("some text")
    tokenize(str(tmp_path / "a.txt"), tmp_path / "out")
    line = f"{sys.executable} {ROOT}/scripts/inspect_data.py {tmp_path}/out | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stderr == ""

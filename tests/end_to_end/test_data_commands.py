"""The data commands as a user runs them: killed halfway, repeated, inspected, misused."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pc.data import Manifest
from pc.data.tokenizing import tokenize
from pc.errors import UserError

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with six parquet files of 0.8 MB of text, enough work to be killed in between."""
    folder = tmp_path_factory.mktemp("work")
    choose = random.Random(0)
    words = ["".join(choose.choices("etaoinshrdlu", k=choose.randint(1, 9))) for _ in range(5000)]
    for number in range(6):
        texts = [" ".join(choose.choices(words, k=500)) for _ in range(300)]
        (folder / "parquet").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts}), folder / "parquet" / f"{number}.parquet")
    return folder


ARGUMENTS = ["--input", "parquet/*.parquet", "--validation-fraction", "0.05", "--processes", "1"]


@pytest.fixture(scope="module")
def finished(work) -> Path:
    return tokenize(str(work / "parquet" / "*.parquet"), work / "finished", validation_fraction=0.05).folder


def test_killed_run_is_continued(work, finished, monkeypatch, command):
    monkeypatch.chdir(work)
    killed = work / "killed"
    words = [sys.executable, str(SCRIPTS / "tokenize_fineweb.py"), *ARGUMENTS, "--output", "killed"]
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while len(list(killed.glob("units/*.json"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    units = sorted(killed.glob("units/*.json"))
    assert 2 <= len(units) < 6, "the run was over before it could be killed"
    stamps = {path: path.stat().st_mtime_ns for path in units}
    with pytest.raises(UserError, match="killed is not finished"):
        Manifest.read(killed)

    status, printed, errors = command("tokenize_fineweb.py", *ARGUMENTS, "--output", "killed")
    assert status == 0, errors
    assert "killed is complete" in printed and "inspect_data.py killed" in printed
    assert {path: path.stat().st_mtime_ns for path in units} == stamps, "finished shards were made again"
    assert Manifest.read(killed).shards == Manifest.read(finished).shards
    for path in finished.rglob("*.npy"):
        np.testing.assert_array_equal(np.load(path), np.load(killed / path.relative_to(finished)))
    assert not list(killed.rglob(".*"))


def test_array_tasks_share_the_work(work, finished, monkeypatch, command):
    monkeypatch.chdir(work)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "2")
    for task in ("10", "11"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        _, printed, _ = command("tokenize_fineweb.py", *ARGUMENTS, "--output", "array")
        assert ("complete when all are" in printed) == (task == "10")
    assert Manifest.read(work / "array").shards == Manifest.read(finished).shards


def test_inspect_shows_what_is_there(work, finished, monkeypatch, command):
    monkeypatch.chdir(work)
    _, printed, _ = command("inspect_data.py", "finished", "--documents", "2")
    for expected in ("mistral-common", "checksums    correct", "--- document of"):
        assert expected in printed


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("tokenize_fineweb.py", ["--input", "parquet", "--output", "finished"], "was started with source"),
        (
            "tokenize_fineweb.py",
            ["--input", "parquet", "--output", "x", "--part", "2/2"],
            "argument --part: 2/2 must be K/N",
        ),
        (
            "train_tokenizer.py",
            ["--input", "x", "--vocab-size", "100", "--output", "x"],
            "--input x: no parquet file",
        ),
        ("inspect_data.py", ["nowhere"], "data folder nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(script, arguments, message, work, finished, monkeypatch, command):
    monkeypatch.chdir(work)
    status, _, error = command(script, *arguments)
    *usage, last = error.strip().splitlines()
    assert status == 2 and message in last and (not usage or usage[0].startswith("usage: "))

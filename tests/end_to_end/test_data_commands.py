"""The data commands as a user runs them: shared by tasks, inspected, misused."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pc.data import Manifest
from pc.data.tokenizing import tokenize


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with six parquet files."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "parquet").mkdir()
    for number in range(6):
        texts = [f"document {number} {i}" for i in range(30)]
        pq.write_table(pa.table({"text": texts}), folder / "parquet" / f"{number}.parquet")
    return folder


ARGUMENTS = ["--input", "parquet/*.parquet", "--validation-fraction", "0.05", "--processes", "1"]


@pytest.fixture(scope="module")
def finished(work) -> Path:
    return tokenize(str(work / "parquet" / "*.parquet"), work / "finished", validation_fraction=0.05).folder


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

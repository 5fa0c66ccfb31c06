"""mypy and ruff find nothing, with the settings of pyproject.toml; the pre-commit hooks run the same."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["mypy", "ruff check", "ruff format --check"])
def test_it_finds_nothing(command):
    run = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr

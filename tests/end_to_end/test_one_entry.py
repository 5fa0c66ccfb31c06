"""A level, a model size, an optimizer and a metric are one entry each: CONTRIBUTING's diffs, applied to a copy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny import ROOT, write_small_config


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """run(*words of Python) -> its output, in a copy of this project with the four entries."""
    folder = tmp_path_factory.mktemp("contributed")
    for name in ("pc", "pc_recipe", "scripts", "tests", "train_configs", "docs", "examples", "results"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, ROOT.glob("*")):
        shutil.copy(file, folder)
    (diffs,) = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    # without context lines, so that it does not matter which other entries a table has
    subprocess.run(
        ["git", "apply", "--unidiff-zero", "-"],
        input=diffs,
        text=True,
        cwd=folder,
        env=outside,
        check=True,
    )

    def run(*words: object) -> str:
        environment = {**os.environ, "PYTHONPATH": str(folder), "NGPU": "1"}
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


def test_the_diffs_apply(copy):
    assert "160M" in copy("-c", "print(open('pc_recipe/config/model_sizes.py').read())")
    assert "level 5" in copy("-c", "import pc; print(pc.PCLinear(3, 4, pc.PCConfig(level=5, blocks='o')))")


@pytest.mark.soak
def test_entries_are_all_that_a_run_needs(copy, tiny_shards, tmp_path):
    """A run uses all entries but the size, which would take too long: a dry run with it counts the optimizer's one state."""
    config = write_small_config(tmp_path / "small.toml", tiny_shards, steps=2, interval=2)
    words = ["--optimizer.name=SGD", "--optimizer.sgd_momentum=0.8", "--pc.level=5", "--diagnostics.spectra_freq=1"]
    copy("-m", "pc_recipe.runs.local", config, *words)
    measured: dict = {}
    for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines():
        measured |= json.loads(line)
    rank, condition = (measured[f"spectra/{name}/layers.0.attention.wo"] for name in ("stable_rank", "condition"))
    assert condition > 1 < rank < 256  # of 256 singular values that differ
    other = ["--world-size=1", "--model.flavor=160M", f"--job.dump_folder={tmp_path / 'other'}"]
    said = [copy("scripts/dry_run.py", config, *other, *more) for more in (words, [])]
    of_sgd, of_adamw = (float(re.search(r"optimizer ([0-9.]+)", text)[1]) for text in said)
    assert "level 5" in said[0] and 0 < of_sgd < of_adamw


@pytest.mark.soak
@pytest.mark.parametrize(
    "tests", ["--fast", "tests/unit/train/test_diagnostics.py", "tests/unit/train/test_optimizers.py"]
)
def test_the_tests_pass_with_the_entries(copy, tests):
    assert "passed" in copy("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", tests)

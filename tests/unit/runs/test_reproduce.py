"""docs/reproduce.md and scripts/reproduce_debug.py name the same rows, and files that exist."""

import importlib.util
import re
import subprocess
import sys

import pytest

from helpers.tiny import ROOT
from pc_recipe.config.model_sizes import FLAVORS
from pc_recipe.plan.check import check
from pc_recipe.runs.sweep import equal_runs
from pc_recipe.runs.sweep.spec import load

_spec = importlib.util.spec_from_file_location("reproduce_debug", ROOT / "scripts" / "reproduce_debug.py")
reproduce = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reproduce)


def test_document_and_script_have_the_same_rows():
    text = (ROOT / "docs" / "reproduce.md").read_text()
    table = [line.split("|") for line in text.splitlines() if line.startswith("| ") and line.count("|") == 7]
    named = {row for cells in table for row in re.findall(r"`([a-z-]+)`", cells[2])}
    assert named == reproduce.rows("evals").keys() - {"data"}
    scripts = {word for cells in table for word in re.findall(r"scripts/\w+\.py", cells[3])}
    commands = [words for row in reproduce.rows("").values() for words in row]
    run = {word for words in commands for word in words if word.endswith(".py")}
    assert {words[words.index("--flavor") + 1] for words in commands if "--flavor" in words} <= FLAVORS.keys()
    assert scripts <= run and all((ROOT / script).is_file() for script in run)


@pytest.mark.parametrize("row", reproduce.rows("evals"))
def test_a_row_makes_what_it_reads(row):
    """So that it works alone in a new clone."""
    made = set()
    for words in reproduce.rows("evals")[row]:
        inputs = [word for before, word in zip(["", *words], words) if before != "--output"]
        read = {found[1] for word in inputs if (found := re.search(rf"{reproduce.OUT}/(\w+)", word))}
        assert read <= made
        if "data/demo" in words or words[:2] == ["scripts/sweep.py", "run"]:
            assert reproduce.DATA in reproduce.rows("evals")[row]
        made |= {found[1] for word in words if (found := re.search(rf"{reproduce.CONFIGS}/(\w+)\.toml", word))}


def test_the_sweeps_at_debug_size_are_the_papers(monkeypatch):
    """They have the same axes, share equal runs, and use a config that trains on this machine."""
    monkeypatch.chdir(ROOT)
    sweeps = [load(path) for path in reproduce.sweeps(*reproduce.SWEEPS)]
    by_name = dict(zip(reproduce.SWEEPS, sweeps, strict=True))
    for name in ("pc_level", "pc_blocks", "recovery_gamma", "polar_express"):
        papers = load(f"train_configs/sweeps/{name}.toml")
        assert [run.settings for run in by_name[name].runs] == [run.settings for run in papers.runs]
    groups = equal_runs.group_runs(sweeps)
    assert sum(len(sweep.runs) for sweep in sweeps) - len(groups) == 8
    report = check(sweeps[0].runs[1].resolved, 1, needs_data=False)
    assert report.errors == []


@pytest.mark.soak
def test_every_row_at_debug_size():
    """From commands to pictures; a quarter of an hour on two free cores, half an hour at most."""
    done = subprocess.run([sys.executable, "scripts/reproduce_debug.py"], cwd=ROOT, timeout=1800)
    assert done.returncode == 0
    figures = ROOT / reproduce.OUT / "figures"
    assert len([*figures.rglob("*.png"), *figures.glob("*.html")]) >= 20
    assert (figures / "scores" / "table.limit-2.md").is_file() and (figures / "cost-muon" / "cost.md").is_file()

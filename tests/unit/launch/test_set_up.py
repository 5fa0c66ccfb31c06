"""The set-up scripts' own errors, with commands of the system replaced by ones that answer badly, and what they install."""

import hashlib
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.tiny import ROOT

SYSTEM = ("bash", "dirname", "basename", "awk", "cat", "sha256sum", "env", "grep")


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts without an environment, and a PATH with only what a test puts there."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    (root / "train_configs").mkdir()
    for name in (
        *("run_llama_train.sh", "run_tests.sh", "pyproject.toml", "constraints.txt"),
        *("scripts/set_up.sh", "train_configs/debug.toml"),
    ):
        shutil.copy(ROOT / name, root / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in SYSTEM:
        (programs / name).symlink_to(shutil.which(name))
    program(programs, "df", "echo Filesystem; echo / 0 0 999999999 0 /")
    return root


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
    (folder / name).chmod(0o755)


def run(root: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    programs = root.parent / "programs"
    clean = {"PATH": str(programs), "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(words, cwd="/", env=clean, capture_output=True, text=True)


@pytest.mark.parametrize("config", ["train_configs/debug.toml", None])
def test_a_set_up_environment_is_used_at_once_and_from_anywhere(checkout, config):
    """The active environment's python gets the config and the overrides; no pip runs."""
    environment = checkout.parent / "environment"
    (environment / "bin").mkdir(parents=True)
    program(environment / "bin", "python", 'case "$1" in -c) exit 0;; *) echo "$PWD|$*";; esac')
    needs = [(checkout / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    digest = hashlib.sha256(b"".join(needs)).hexdigest()
    (environment / ".pc-layer-installed[all]").write_text(f"{digest}  - {checkout}\n")
    words = [str(checkout / "run_llama_train.sh"), *([config] if config else []), "--training.steps", "5"]
    done = run(checkout, *words, VIRTUAL_ENV=str(environment))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{checkout}|-m pc.launch.local {checkout}/train_configs/debug.toml --training.steps 5\n"


def test_constraints_fit_the_requirements():
    """Every requirement but torch and triton has one pinned version, and it is in the range that pyproject.toml gives."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for name, texts in extras.items() if name != "wandb" for text in texts]
    wanted += [Requirement(text) for text in project["dependencies"]]
    names = {canonicalize_name(requirement.name) for requirement in wanted} - {"pc-layer"}
    assert names - set(pinned) == {"torch", "triton"}
    for requirement in wanted:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, requirement

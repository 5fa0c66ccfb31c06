"""What the set-up script runs, and what it installs."""

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.tiny import ROOT

DEBUG = "train_configs/debug.toml"


def make_checkout(folder: Path, python: str) -> tuple[Path, Path]:
    """The files that set up the project, and an environment whose python is this line of shell."""
    checkout, environment = folder / "checkout", folder / "environment"
    for name in ("run_llama_train.sh", "pyproject.toml", "constraints.txt", "scripts/set_up.sh", DEBUG):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    program = environment / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{python}\n")
    program.chmod(0o755)
    return checkout, environment


def run(checkout: Path, environment: Path, *words: str, **others: str) -> subprocess.CompletedProcess:
    outside = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(environment)} | others
    command = [checkout / "run_llama_train.sh", *words]
    return subprocess.run(command, cwd="/", env=outside, capture_output=True, text=True)


def make_set_up(folder: Path) -> tuple[Path, Path]:
    """An environment in which everything is installed; its python prints its arguments."""
    checkout, environment = make_checkout(folder, 'case "$1" in -c) exit 0;; *) echo "$PWD|$*";; esac')
    needs = [(checkout / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    digest = hashlib.sha256(b"".join(needs)).hexdigest()
    (environment / ".pc-layer-installed[recipe]").write_text(f"{digest}  - {checkout}\n")
    return checkout, environment


def test_a_set_up_environment_is_used_at_once_and_from_anywhere(tmp_path):
    """The active environment's python gets the config and the overrides; no pip runs."""
    checkout, environment = make_set_up(tmp_path)
    done = run(checkout, environment, DEBUG, "--training.steps", "5", CDPATH=f".:{checkout}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{checkout}|-m pc_recipe.runs.local {checkout}/{DEBUG} --training.steps 5\n"


def test_without_a_config_a_pair_is_trained_and_compared(tmp_path):
    checkout, environment = make_set_up(tmp_path)
    train = f"{checkout}|-m pc_recipe.runs.local {checkout}/train_configs/demo.toml"
    assert run(checkout, environment, "--debug.seed", "3").stdout.splitlines() == [
        f"{train} --pc.enable false --job.dump_folder outputs/demo/baseline --debug.seed 3",
        f"{train} --job.dump_folder outputs/demo/pc --debug.seed 3",
        f"{checkout}|scripts/report.py outputs/demo/baseline outputs/demo/pc --output outputs/demo/report.html",
    ]


def test_the_pair_ends_with_its_first_failure(tmp_path):
    checkout, environment = make_set_up(tmp_path)
    program = environment / "bin" / "python"
    program.write_text('#!/bin/sh\ncase "$1" in -c) exit 0;; *) echo "$*"; exit 130;; esac\n')
    done = run(checkout, environment)
    assert (done.returncode, len(done.stdout.splitlines())) == (130, 1)


@pytest.mark.parametrize("words", [["--help"], [DEBUG, "--help", "pc"], ["-h"]])
def test_help_installs_nothing(tmp_path, words):
    checkout, environment = make_checkout(tmp_path, "echo ran; exit 0")
    done = run(checkout, environment, *words)
    assert (done.returncode, "ran" in done.stdout) == (0, False)
    assert done.stdout.startswith("Train a small Llama 2 twice") and "run_llama_train.sh --setup" in done.stdout
    checkout, environment = make_set_up(tmp_path / "set_up")
    assert run(checkout, environment, *words).stdout.endswith(f"{' '.join(words[words[0] == DEBUG :])}\n")


def test_setup_ends_with_the_script_that_activates(tmp_path):
    checkout, environment = make_set_up(tmp_path)
    assert run(checkout, environment, "--setup").stdout.split()[-1] == f"{environment}/bin/activate"


def test_what_is_installed_into_an_active_environment_is_reported(tmp_path):
    checkout, environment = make_checkout(tmp_path, "exit 0")
    done = run(checkout, environment)
    assert done.returncode == 0, done.stderr
    assert f"into {environment}\nIt was active: packages in it change to the versions of constraints.txt" in done.stdout


def test_no_file_of_the_current_folder_is_run(tmp_path):
    """`python -m pip` would run a pip.py of the current folder."""
    checkout, environment = make_checkout(tmp_path, 'echo "$PWD" >>"$MARK"')
    (tmp_path / "data").mkdir()
    outside = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(environment), "MARK": str(tmp_path / "mark")}
    subprocess.run([checkout / "run_llama_train.sh"], env=outside, cwd=tmp_path / "data", check=True)
    folders = (tmp_path / "mark").read_text().split()
    assert len(folders) >= 4 and set(folders) == {str(checkout)}


def test_the_constraints_hold_also_for_what_packages_are_built_with(tmp_path):
    checkout, environment = make_checkout(
        tmp_path, 'case "$*" in *"pip install"*) echo "$PWD $PIP_CONSTRAINT $PIP_BUILD_CONSTRAINT";; esac'
    )
    done = run(checkout, environment, "--setup", PIP_CONSTRAINT="/of/a/container.txt")
    assert f"\n{checkout} /of/a/container.txt constraints.txt constraints.txt\n" in done.stdout
    assert "\nsetuptools==" in (ROOT / "constraints.txt").read_text()


def test_two_starts_install_one_after_the_other(tmp_path):
    checkout, environment = make_checkout(
        tmp_path, 'case "$*" in *"pip install"*) echo begins >>"$MARK"; sleep 1; echo ends >>"$MARK";; esac'
    )
    outside = {"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(environment), "MARK": str(tmp_path / "mark")}
    command = [checkout / "run_llama_train.sh", "--setup"]
    both = [subprocess.Popen(command, env=outside, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [start.wait() for start in both] == [0, 0]
    said = (tmp_path / "mark").read_text().split()
    assert said == ["begins", "ends"] * (len(said) // 2) and said


def test_third_party_code_is_pinned():
    assert re.findall("repo: (.*)", (ROOT / ".pre-commit-config.yaml").read_text()) == ["local"]
    pinned = (ROOT / "constraints.txt").read_text()
    for file in (ROOT / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (\S+)", file.read_text())
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used), used
        assert "permissions:\n  contents: read\n" in file.read_text()
        installed = [line.split(" --")[0] for line in re.findall(r"pip\"? install ([^&$\n]+)", file.read_text())]
        for name in " ".join(installed).split():
            assert "==" in name or f"\n{name}==" in pinned or name in ("dist/*.whl", "'.[docs]'"), name


def test_constraints_fit_the_requirements():
    """Every requirement but torch and triton is pinned, to a version in the range that pyproject.toml gives."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for texts in extras.values() for text in texts]
    wanted += [Requirement(text) for text in project["dependencies"]]
    names = {canonicalize_name(requirement.name) for requirement in wanted} - {"pc-layer"}
    assert names - set(pinned) == {"torch", "triton"}
    for requirement in wanted:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, requirement

"""Python files in the current folder are not run."""

import os
import subprocess
import sys

import pytest

from pc_recipe.data import wheel
from pc_recipe.files.own_code import ROOT, own_code
from pc_recipe.runs import launch, slurm

CODE = "import os; open(os.environ['MARK'], 'a').write(__name__ + ' '); print('mine')\n"
NAMES = [
    "pc", "pc_recipe", "pip", "torch", "torchtitan", "multiprocessing", "socket", "random", "runpy", "site", "sitecustomize",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder full of code that must not run."""
    for name in NAMES:
        (tmp_path / "data" / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (tmp_path / "data" / name / file).write_text(CODE)
    monkeypatch.chdir(tmp_path / "data")
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", f":{ROOT}")  # an empty entry stands for the current folder
    yield tmp_path / "data"
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()


STARTS = {
    "a module": ["-m", "pc_recipe.files.own_code"],
    "a program": ["-c", "import pc_recipe.files.own_code, socket, random"],
    "pip": ["-m", "pip", "--version"],
    "a server of forks": ["-c", "import multiprocessing as m; m.get_context('forkserver').Pool(1).map(abs, [1])"],
    "a spawned process": ["-c", "import multiprocessing as m; m.get_context('spawn').Pool(1).map(abs, [1])"],
    "what it starts": [
        "-c", "import subprocess, sys; subprocess.run([sys.executable, '-m', 'pip', '--version'], check=True)"
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", STARTS)
def test_what_is_started_runs_this_code(what, folder):
    environment = {**os.environ, **own_code()}
    assert environment["PYTHONPATH"] == str(ROOT)
    subprocess.run([sys.executable, *STARTS[what]], env=environment, check=True)


def test_without_own_code_the_folder_comes_first(folder):
    """Control: the code would run."""
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, text=True)
    assert "mine" in done.stdout
    os.unlink(os.environ["MARK"])


@pytest.mark.parametrize("start", ["ranks", "job", "pip"])
def test_commands_start_processes_with_own_code(start, folder, monkeypatch, tmp_path):
    given = []
    if start == "ranks":
        given.append(launch.build_environment(1))
    else:
        done = subprocess.CompletedProcess([], 0, "1", "")
        monkeypatch.setattr(subprocess, "run", lambda *_, env, **__: given.append(env) or done)
    if start == "job":
        slurm.submit_job(tmp_path / "run", [], [])
    if start == "pip":
        with pytest.raises(ValueError):
            wheel.download_wheel("none", "", tmp_path)
    assert [(one["PYTHONSAFEPATH"], one["PYTHONPATH"]) for one in given] == [("1", str(ROOT))]


def test_processes_that_tokenise_are_started_with_own_code(folder, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.jsonl").write_text('{"text": "some words"}\n' * 30000)
    words = ["--input", "../in", "--output", "../out", "--processes", "2", "--shard-megabytes", "1"]
    program, environment = str(ROOT / "scripts/tokenize_text.py"), os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "units" / "00001.json").exists()  # with a single unit there would be no processes


def test_figures_ignore_a_matplotlibrc_in_the_folder(folder):
    (folder / "matplotlibrc").write_text("text.usetex: True\nfigure.dpi: 7\n")
    program = (
        "import matplotlib, pc_recipe.pages.plots; print(*map(matplotlib.rcParams.get, ['text.usetex', 'figure.dpi']));"
        "from pc.report.draw import svg; svg('$\\frac', lambda axes: axes.plot([1], label='$\\frac$'))"
    )
    environment = {**os.environ, **own_code()}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "False 100.0\n"

"""Commands report mistakes and print their help before they import torch, which takes seconds."""

import re
import subprocess
import sys

import pytest

from helpers.made_runs import make_begun
from helpers.tiny import ROOT
from helpers.torchless import launch, run_without_torch
from pc_recipe.files.lock import lock

TAKE_OVERRIDES = ("cost.py", "dry_run.py", "submit.py")
CONFIG, NONE, SMALL = "train_configs/271m_adamw_pc.toml", "outputs/nothing", "should be a whole number, 1 or more"


def test_a_second_start_in_a_folder_is_refused_at_once(tiny_shards, tmp_path):
    folder = tmp_path / "run"
    with lock(folder):
        words = f"--job.dump_folder={folder}", f"--data.path={tiny_shards}", "--training.seq_len=64"
        status, output = launch("train_configs/debug.toml", *words)
    assert status == 2
    assert output.strip() == (
        f"error: {folder}: another process is training here; wait for it, or stop it; another run needs another "
        "--job.dump_folder"
    )


def test_another_model_is_refused_before_torch_is_imported(tmp_path):
    make_begun(tmp_path)
    status, output = launch("train_configs/debug.toml", f"--job.dump_folder={tmp_path}", "--model.dim=32")
    assert status == 2 and output.startswith("error: model.dim is 256 in the run of ") and output.count("\n") == 1


def run_script(script, *words) -> tuple[int, str]:
    return run_without_torch(f"sys.argv = {['x', *words]!r}\ntry: runpy.run_path({str(script)!r}, run_name='__main__')")


@pytest.mark.parametrize(
    "words, said",
    [
        ("--help lerning", "no key has 'lerning' in its name"),
        ("--data.path=tests --data.validation_path=nowhere", "data.validation_path: data folder nowhere"),
        ("--checkpoint.initial_load_path=nowhere", "checkpoint.initial_load_path: nowhere does not exist"),
    ],
)
def test_a_start_reports_mistakes(words, said):
    status, output = launch(CONFIG, *words.split())
    assert said in output and status == 2


@pytest.mark.parametrize(
    "processes, words, said",
    [
        ("two", (), "NGPU=two should be a number of processes"),
        ("3", ("--parallelism.tensor_parallel_degree=2",), "3 GPUs are not a multiple of tensor_parallel_degree"),
    ],
)
def test_a_start_reports_layouts_that_do_not_fit(monkeypatch, processes, words, said):
    monkeypatch.setenv("NGPU", processes)
    status, output = launch("train_configs/debug.toml", *words)
    assert output.startswith(f"error: {said}") and output.count("\n") == 1 and status == 2


@pytest.mark.parametrize(
    "words, said",
    [
        (f"slurm/submit.py {CONFIG} --nodes=3", "is not a multiple of 24 data-parallel ranks"),
        (f"slurm/submit.py {CONFIG} --data.path=nowhere", "data.path: data folder nowhere does not exist"),
        (
            "sweep.py run train_configs/sweeps/debug_lr.toml --training.steps=9",
            r'only from its file: write "training.steps" = \[VALUE\] under \[axes\]$',
        ),
        ("tokenize_text.py --input x --output x --part 2/2", "argument --part: 2/2 must be K/N"),
        *(
            (f"{command} {number}", f"{number} {SMALL}")
            for command, number in (
                ("tokenize_text.py --input a.txt --output out --shard-megabytes", "0"),
                ("tokenize_text.py --input a.txt --output out --max-documents", "-1"),
                ("tokenize_text.py --input a.txt --output out --processes", "1.5"),
                ("inspect_data.py data --documents", "0"),
            )
        ),
        ("report.py tests --output page.png", "--output page.png: should end in .html"),
        *(
            (f"{command}", "outputs/nothing.*(does not exist|no such)")
            for command in (
                f"report.py {NONE}",
                f"export_hf.py {NONE} out",
                f"generate.py {NONE} prompt",
                f"inspect_data.py {NONE}",
                f"score.py name={NONE}",
                f"spectra.py {NONE}",
                f"tokenize_text.py --input {NONE}.txt --output out",
                f"train_tokenizer.py --input {NONE}.txt --vocab-size 100 --output x",
            )
        ),
    ],
)
def test_a_script_reports_mistakes(words, said):
    script, *rest = words.split()
    status, output = run_script(f"scripts/{script}", *rest)
    assert status == 2 and re.search(said, output), output


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda file: file.name)
def test_help_of_a_script(script):
    status, output = run_script(script, "--help")
    assert status == 0 and output.startswith("usage: ")
    assert ("[--section.key=value ...]" in output) == (script.name in TAKE_OVERRIDES)


def test_help_without_docstrings():
    """Images of containers may set PYTHONOPTIMIZE=2."""
    scripts = [*sorted(map(str, (ROOT / "scripts").rglob("*.py"))), "pc.report"]
    code = f"""
import runpy, sys
for script in {scripts}:
    sys.argv = [script, "--help"]
    try:
        (runpy.run_path if script.endswith(".py") else runpy.run_module)(script, run_name="__main__")
    except SystemExit as end:
        print("status of", script, end.code)
"""
    done = subprocess.run([sys.executable, "-OO", "-B", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert [line for line in done.stdout.splitlines() if line.startswith("status of ")] == [
        f"status of {script} 0" for script in scripts
    ], done.stderr

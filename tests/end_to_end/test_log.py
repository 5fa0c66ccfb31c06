"""What a training run prints, at its end too, and what the same command prints once the run has finished."""

import os
import re
import shlex
import subprocess
import sys
import time

import pytest

from helpers.tiny import ROOT, write_small_config
from helpers.torchless import launch

STEPS = 6
STEP = r"step +(\d)/6  loss \d\.\d{4}  grad_norm [\d.]+  [\d,]+k? tok/s(  0:00:\d\d left)?"


@pytest.fixture(scope="module")
def finished(tiny_shards, tmp_path_factory):
    """(config, folder, printed lines) of a run whose output went to a file."""
    folder = tmp_path_factory.mktemp("log")
    config = write_small_config(folder / "run.toml", tiny_shards, steps=STEPS, interval=STEPS)
    with open(folder / "printed", "w") as printed:
        words = [sys.executable, "-m", "pc_recipe.runs.local", str(config)]
        environment = os.environ | {"NGPU": "1", "OMP_NUM_THREADS": "1"}
        status = subprocess.run(words, cwd=ROOT, env=environment, stdout=printed, stderr=printed).returncode
    lines = (folder / "printed").read_text().splitlines()
    assert status == 0, lines
    return config, folder / "run", lines


def test_one_line_per_step_and_no_noise(finished):
    lines = [re.sub(r"^\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in finished[2]]
    steps = [match for match in (re.fullmatch(STEP, line) for line in lines) if match]
    assert [match[1] for match in steps] == list("123456")
    assert [bool(match[2]) for match in steps] == [False, False, True, True, True, True]  # the first steps are slow
    assert len(lines) < 25 and max(map(len, lines)) < 300
    text = "\n".join(lines)
    assert not re.search(r"\x1b|mfu|inf\b|nan|warning|_enforced|tests/assets|titan\]", text, re.IGNORECASE)
    validated = re.findall(r"step 6/6  validation_loss (\d\.\d{4})  in ", text)
    assert f"Finished at step 6: train loss {re.findall(r'loss (.{6})', steps[-1][0])[0]}, validation loss {validated[0]}, 384 tokens in 0:00:" in text  # fmt: skip


def test_the_commands_at_the_end_run_as_printed(finished, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = finished[2]
    (begin,) = [number for number, line in enumerate(lines) if line.endswith("Next:")]
    assert lines[begin] == f"{finished[1]} has checkpoint, metrics.jsonl. Next:"  # no TensorBoard here
    commands = [shlex.split(line, comments=True) for line in lines[begin + 1 :]]
    assert [words[1] for words in commands] == [f"scripts/{name}.py" for name in ("report", "export_hf", "generate")]
    for python, script, *words in commands:
        assert os.path.samefile(python, sys.executable)
        status, _, err = command(script.removeprefix("scripts/"), *words)
        assert status == 0, err
    assert (finished[1] / "hugging_face" / f"step-{STEPS}" / "config.json").exists()


def test_a_finished_run_says_so_at_once(finished):
    """Without importing torch."""
    config, folder, lines = finished
    begin = time.monotonic()
    status, said = launch(str(config))
    assert status == 0 and time.monotonic() - begin < 60  # about a second on an idle machine
    first, *rest = said.splitlines()
    assert first.startswith(f"{folder} has finished before. To train on, raise training.steps")
    assert rest == lines[-len(rest) :]

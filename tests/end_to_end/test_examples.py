"""The examples run, learn, and go on from their checkpoints as if they had not stopped."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from small_config import ROOT

EXAMPLES = ROOT / "examples"


def run(*words, program=(sys.executable,)):
    done = subprocess.run([*program, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_loop(tmp_path, ranks):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    program = torchrun if ranks > 1 else (sys.executable,)
    run(EXAMPLES / "loop.py", "--steps", 3, "--folder", tmp_path / "stopped", program=program)
    resumed = run(EXAMPLES / "loop.py", "--steps", 5, "--folder", tmp_path / "stopped", program=program)
    straight = run(EXAMPLES / "loop.py", "--steps", 5, "--folder", tmp_path / "straight", program=program)
    assert losses(resumed) == losses(straight)[3:] and len(losses(resumed)) == 2
    assert losses(straight)[-1] < losses(straight)[0] - 1
    one, other = (torch.load(tmp_path / name / "plain.pt", weights_only=True) for name in ("stopped", "straight"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert set(other) == {"0.weight", "3.weight", "4.weight"} | {
        f"{block}.{layer}.weight" for block in (1, 2) for layer in ("norm", "up", "down")
    }


def test_hugging_face_trainer(tmp_path):
    from transformers import AutoModelForCausalLM

    for steps in (5, 7):
        run(EXAMPLES / "hf_trainer.py", "--steps", steps, "--folder", tmp_path / "stopped")
    run(EXAMPLES / "hf_trainer.py", "--steps", 7, "--folder", tmp_path / "straight")
    one, other = (load_file(tmp_path / name / "plain" / "model.safetensors") for name in ("stopped", "straight"))
    assert one.keys() == other.keys() and not any("gamma" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in other)
    state = json.loads((tmp_path / "straight" / "checkpoint-7" / "trainer_state.json").read_text())
    history = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert history[-1] < history[0] - 0.5
    AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "plain")


def test_short():
    assert all(len(path.read_text().splitlines()) < 100 for path in EXAMPLES.glob("*.py"))

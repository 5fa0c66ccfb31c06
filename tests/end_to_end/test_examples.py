"""The examples run, learn, and resume exactly from their checkpoints."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from helpers.tiny import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(example, *arguments, ranks=1) -> stdout; one rank in this process, because imports take long."""

    def run(example, *arguments, ranks=1):
        words = [str(word) for word in (EXAMPLES / example, *arguments)]
        if ranks > 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            done = subprocess.run([*torchrun, *words], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        runpy.run_path(words[0], run_name="__main__")
        return capsys.readouterr().out

    return run


def losses(output):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_loop_with_a_cuda_build_and_no_gpu(run, tmp_path, monkeypatch):
    """Linux's torch of `pip install torch` names CUDA as its accelerator, also on a machine without one."""
    build = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else build
    )
    run("loop.py", "--steps", 1, "--folder", tmp_path)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_loop(run, tmp_path, ranks):
    run("loop.py", "--steps", 3, "--folder", tmp_path / "stopped", ranks=ranks)
    resumed = run("loop.py", "--steps", 5, "--folder", tmp_path / "stopped", ranks=ranks)
    straight = run("loop.py", "--steps", 5, "--folder", tmp_path / "straight", ranks=ranks)
    assert losses(resumed) == losses(straight)[3:] and len(losses(resumed)) == 2
    assert losses(straight)[-1] < losses(straight)[0] - 1
    one, other = (torch.load(tmp_path / name / "plain.pt", weights_only=True) for name in ("stopped", "straight"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert set(other) == {"0.weight", "3.weight", "4.weight"} | {
        f"{block}.{layer}.weight" for block in (1, 2) for layer in ("norm", "up", "down")
    }


def test_hugging_face_trainer(run, tmp_path):
    from transformers import AutoModelForCausalLM

    for steps in (5, 7):
        run("hf_trainer.py", "--steps", steps, "--folder", tmp_path / "stopped")
    run("hf_trainer.py", "--steps", 7, "--folder", tmp_path / "straight")
    one, other = (load_file(tmp_path / name / "plain" / "model.safetensors") for name in ("stopped", "straight"))
    assert one.keys() == other.keys() and not any("gamma" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in other)
    state = json.loads((tmp_path / "straight" / "checkpoint-7" / "trainer_state.json").read_text())
    history = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert history[-1] < history[0] - 0.5
    AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "plain")


@pytest.mark.parametrize(
    "example, ranks",
    [
        ("cap_singular_values", 1),
        ("shampoo", 1),
        ("hyperball", 1),
        pytest.param("hyperball", 2, marks=pytest.mark.soak),
    ],
)
def test_optimizers_on_owners(run, monkeypatch, example, ranks):
    monkeypatch.syspath_prepend(EXAMPLES)
    found = losses(run(f"{example}.py", ranks=ranks))
    assert found[-1] < found[0] / 2

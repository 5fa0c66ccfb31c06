"""The examples run, learn, and resume exactly from their checkpoints."""

import json
import re
import subprocess
import sys

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file

from helpers.tiny import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(command):
    """run(example, *arguments) -> stdout."""

    def run(example, *arguments):
        status, said, errors = command(str(EXAMPLES / example), *arguments)
        assert status == 0, errors
        return said

    return run


def losses(output):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def test_loop_with_a_cuda_build_and_no_gpu(run, tmp_path, monkeypatch):
    """On Linux, the torch of `pip install torch` names CUDA as its accelerator even on a machine without a GPU."""
    named = torch.device("cuda")
    found = torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else named
    monkeypatch.setattr(*found)
    run("loop.py", "--steps", 1, "--folder", tmp_path)


def test_loop(run, tmp_path):
    run("loop.py", "--steps", 3, "--folder", tmp_path / "stopped")
    resumed = run("loop.py", "--steps", 5, "--folder", tmp_path / "stopped")
    straight = run("loop.py", "--steps", 5, "--folder", tmp_path / "straight")
    assert losses(resumed) == losses(straight)[3:] and len(losses(resumed)) == 2
    assert losses(straight)[-1] < losses(straight)[0] - 1
    one, other = (torch.load(tmp_path / name / "plain.pt", weights_only=True) for name in ("stopped", "straight"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert {"1.norm.weight", "1.up.weight", "4.weight"} < set(other) and not any("gamma" in name for name in other)


@pytest.mark.soak
@pytest.mark.parametrize(
    "example, option, lengths",
    [("loop", "--steps", (3, 5)), ("hf_trainer", "--steps", (5, 7)), ("lightning_trainer", "--epochs", (1, 2))],
)
def test_on_two_ranks(example, option, lengths, tmp_path):
    """Trained in one go, and resumed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for folder, runs in (("stopped", lengths), ("straight", lengths[1:])):
        for length in runs:
            words = [*torchrun, EXAMPLES / f"{example}.py", option, str(length), "--folder", tmp_path / folder]
            subprocess.run(words, check=True, capture_output=True, text=True)
    one, other = (plain_weights(tmp_path / folder) for folder in ("stopped", "straight"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def plain_weights(folder):
    if (folder / "plain.pt").exists():
        return torch.load(folder / "plain.pt", weights_only=True)
    return load_file(folder / "plain" / "model.safetensors")


def test_lightning_trainer(run, tmp_path):
    for epochs in (1, 2):
        resumed = run("lightning_trainer.py", "--epochs", epochs, "--folder", tmp_path / "stopped")
    before, after = losses(run("lightning_trainer.py", "--epochs", 2, "--folder", tmp_path / "straight"))
    assert losses(resumed)[1] == after
    one, other = (plain_weights(tmp_path / name) for name in ("stopped", "straight"))
    assert after < before - 1 and not any("gamma" in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in other)


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


def test_an_optimizer_on_owners(run, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    found = losses(run("shampoo.py"))
    assert found[-1] < found[0] / 2


@pytest.mark.soak
def test_tour(tmp_path):
    """The notebook runs, and is stored as executed: two pictures, smaller condition numbers, an export that loads."""
    losses = []
    (tmp_path / "examples").mkdir()
    stored, notebook = (nbformat.read(EXAMPLES / "tour.ipynb", as_version=4) for _ in range(2))
    place = {"metadata": {"path": str(tmp_path / "examples")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    for version in (stored, notebook):
        outputs = [output for cell in version.cells if cell.cell_type == "code" for output in cell.outputs]
        said = "".join(output.text for output in outputs if output.get("name") == "stdout")
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
        baseline, ours = (float(found) for found in re.findall(r"condition number ([\d.]+)", said))
        assert ours < baseline / 2
        losses.append(
            [float(loss) for pair in re.findall(r"test loss (\S+) at the start, (\S+) after", said) for loss in pair]
        )
        assert losses[-1][1] < losses[-1][0] / 2 and losses[-1][3] < losses[-1][2] / 2
        assert re.search(r"difference of the logits: (0\.0|\d\S*e-0[6-9])\n", said)
    assert losses[0] == pytest.approx(losses[1], abs=0.02)  # processors round differently
    assert "model.safetensors" in {file.name for file in (tmp_path / "outputs" / "tour").iterdir()}
    text = "".join(cell.source for cell in stored.cells if cell.cell_type == "markdown")
    assert all((EXAMPLES / target).exists() for target in re.findall(r"\]\((\S+?)\)", text))

"""PC in the stock trainer of TorchTitan 0.3.0, which runs in processes of its own: PC_TORCHTITAN_03 names a folder with it
(CONTRIBUTING.md)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from helpers.tiny import ROOT
from helpers.torchtitan_03 import make_assets

PACKAGES = os.environ.get("PC_TORCHTITAN_03")
pytestmark = pytest.mark.skipif(not PACKAGES, reason="PC_TORCHTITAN_03 names no folder with TorchTitan 0.3.0")


@pytest.fixture
def train(tmp_path):
    """train(model, ranks, key=value...) -> what `helpers.torchtitan_03.main` returns on the first rank."""
    make_assets(tmp_path / "assets")

    def train(model, ranks=1, **settings):
        path = os.pathsep.join([PACKAGES, str(ROOT), str(ROOT / "tests")])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        run = [*torchrun, "helpers.torchtitan_03", str(tmp_path), json.dumps({"model": model} | settings)]
        ended = subprocess.run(run, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, timeout=900)
        assert ended.returncode == 0, ended.stderr[-6000:]
        return torch.load(tmp_path / "0.pt")

    train.folder = tmp_path
    return train


# one stack of experts counts once; q, k and v of a layer are one weight
@pytest.mark.parametrize("model, blocks, weights", [
    ("llama3", ["o", "ffn"], 6 * 4), ("qwen3", ["q", "k", "v", "ffn"], 8 * 4), ("deepseek_v3", ["o", "ffn"], 6 + 3 + 5 * 6),
])  # fmt: skip
def test_a_stock_model_trains_and_resumes(model, blocks, weights, train):
    straight = train(model, blocks=blocks, **{"checkpoint.enable": True})
    assert straight["weights"] == weights
    assert straight["losses"][6] < straight["losses"][1] - 2
    resumed = train(model, blocks=blocks, **{"checkpoint.enable": True, "checkpoint.load_step": 3})
    assert resumed["losses"] == {step: straight["losses"][step] for step in (4, 5, 6)}
    assert all(torch.equal(value, straight["state"][key]) for key, value in resumed["state"].items())


def test_weights_for_hugging_face(train):
    """The adapter of this model knows the names of the plain model alone; Llama's leaves out those that it does not know."""
    settings = {"last_save_in_hf": True, "last_save_model_only": True, "interval": 9, "enable": True}
    train("deepseek_v3", **{"training.steps": 1}, **{f"checkpoint.{key}": value for key, value in settings.items()})
    [file] = (train.folder / "checkpoint" / "step-1").glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        names = list(tensors.keys())
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in names
    assert not [name for name in names if name.endswith(("_orig", "_gamma", "_u", "_v"))]


def test_gpt_oss_is_attached_and_written(train):
    """With gradients that the test makes: its attention was not tried on CPUs. A layer's wqkv, wo and two stacks of experts."""
    assert train("gpt_oss", blocks=["q", "k", "v", "o", "ffn"], runs=False)["weights"] == 4 * 4


def test_plain_checkpoints_before_and_after(train):
    """A run with PC starts from plain weights, and its checkpoint loads into a run without PC as it is."""
    start = {"checkpoint.enable": True, "checkpoint.interval": 9}
    plain = train("llama3", blocks=[], **start, **{"checkpoint.folder": "plain"})
    from_plain = {"checkpoint.folder": "pc", "checkpoint.initial_load_path": str(train.folder / "plain" / "step-6")}
    trained = train("llama3", **start, **from_plain)
    assert trained["losses"][1] < plain["losses"][1] - 1
    from_pc = {"checkpoint.folder": "after", "checkpoint.initial_load_path": str(train.folder / "pc" / "step-6")}
    after = train("llama3", blocks=[], **start, **from_pc, **{"training.steps": 1})
    assert not any("_orig" in key for key in after["state"])
    assert after["losses"][1] < trained["losses"][6] + 0.1  # its first forward pass has the weights that were loaded


def test_two_ranks_go_on_as_one(train):
    """From one checkpoint; both ranks read equal batches, so their mean loss is that of one rank."""
    one = {"checkpoint.enable": True, "training.local_batch_size": 1, "parallelism.spmd_backend": "partial_dtensor"}
    train("llama3", **one, **{"training.steps": 3})
    go_on = one | {
        "checkpoint.load_step": 3,
        "checkpoint.interval": 9,
        "checkpoint.exclude_from_loading": ["dataloader"],
    }
    alone = train("llama3", **go_on)["losses"]
    both = train("llama3", ranks=2, **go_on)["losses"]
    assert list(both) == [4, 5, 6]
    assert both == pytest.approx(alone, rel=2e-5)  # float32 sums in another order

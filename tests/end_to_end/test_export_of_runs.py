"""A real run on two ranks: its checkpoint's export has its validation loss, and can start another run."""

import pytest
import torch
import torch.nn.functional as F

from helpers import tiny
from helpers.made_runs import make_shards
from helpers.ranks import run_ranks
from pc.data import build_dataloader
from pc.evaluate import hugging_face, plain_weights
from pc.titan.distcp import CheckpointFolder

SETTINGS = ["--model.vocab_size", "32000", "--training.seq_len", "64", "--training.steps", "3"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    tiny.add_tiny_flavor()
    return make_shards(tmp_path_factory.mktemp("text"))


@pytest.fixture
def train(tmp_path, shards):
    """train(name, *overrides) on two ranks; returns the run's folder."""

    def run(name, *overrides):
        config = tiny.write_config(tmp_path / f"{name}.toml", shards, tmp_path / name)
        run_ranks(2, tiny.train, config, [*SETTINGS, *overrides])
        return tmp_path / name

    return run


@torch.no_grad()
def validation_loss(llama, shards):
    """Mean over the tokens that the run of `tiny.CONFIG` validates on."""
    loader = build_dataloader(
        str(shards), "validation", seq_len=64, local_batch_size=2, dp_rank=0, dp_world_size=1, seed=0,
        vocab_size=32_000, limit_sequences=12,
    )  # fmt: skip
    losses = [
        F.cross_entropy(llama(inputs["input"]).logits.flatten(0, 1), labels.flatten(), reduction="none")
        for inputs, labels in loader
    ]
    return torch.cat(losses).double().mean().item()


def require_same_validation_loss(folder, out, shards):
    """The run's last validation loss against that of the export of its last checkpoint."""
    expected = tiny.metrics(folder, "validation_loss")
    found = validation_loss(hugging_face.load(out)[0], shards)
    # each logit carries 32 float32 roundings at most (test_hugging_face); the mean over 768 tokens far fewer
    assert found == pytest.approx(expected[-1], rel=2e-6)
    assert abs(expected[-1] - expected[0]) > 1e-3 * expected[0]  # control: another step is far outside


@pytest.mark.parametrize(
    "overrides",
    [[], ["--pc.schedule", "forward", "--pc.level", "2.616097,-3.550208,2.730920,-0.796809"]],
    ids=["step", "forward"],
)
def test_validation_loss_of_the_export_is_the_runs(train, tmp_path, shards, overrides):
    folder = train("run", *overrides)
    out = hugging_face.export(folder / "checkpoint" / "step-3", tmp_path / "out")
    require_same_validation_loss(folder, out, shards)


# the rate is less than a rounding of any weight
STAND_STILL = ["--optimizer.lr", "1e-30", "--training.steps", "1", "--checkpoint.interval", "1"]


@pytest.mark.parametrize(
    "overrides", [[], pytest.param(["--pc.enable", "false"], marks=pytest.mark.soak)], ids=["pc", "baseline"]
)
def test_export_of_a_baseline_starts_a_run(train, tmp_path, shards, overrides):
    """With a rate that changes nothing a run saves its initial weights; with PC, W is chosen so that PC(W) equals them."""
    first = train("first", "--pc.enable", "false")
    out = hugging_face.export(first / "checkpoint" / "step-3", tmp_path / "out")
    require_same_validation_loss(first, out, shards)
    second = train(
        "second", *overrides, *STAND_STILL, "--checkpoint.initial_load_in_hf", "true",
        "--checkpoint.initial_load_path", str(out),
    )  # fmt: skip
    expected = plain_weights.load(first / "checkpoint" / "step-3").weights
    folder = CheckpointFolder(second / "checkpoint" / "step-1")
    found = folder.read_tensors(list(expected))
    raw = {key: f"pc.{key.removesuffix('weight')}raw" for key in expected}
    preconditioned = [key for key, name in raw.items() if name in folder.shapes()]
    assert len(preconditioned) == (0 if overrides else 8)
    for key, tensor in expected.items():
        # a float64 decomposition, then PC in float32: some 1e-6 of the largest entry; W itself differs by far more
        tolerance = 1e-5 * tensor.abs().max().item() if key in preconditioned else 0.0
        torch.testing.assert_close(found[key], tensor, rtol=0.0, atol=tolerance)
    for key in preconditioned:
        assert (folder.read_tensors([raw[key]])[raw[key]] - expected[key]).abs().max() > 1e-3

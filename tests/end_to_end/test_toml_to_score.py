"""A run from its TOML to its scores with the commands that a user types: trained on two ranks, exported, scored,
continued from."""

import json
import os
import stat

import pytest
import torch
import torch.nn.functional as F

from helpers import tiny
from helpers.made_runs import make_evaluation_data
from helpers.ranks import run_ranks
from helpers.tiny import make_shards
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.evaluate import hugging_face, plain_weights

SETTINGS = ["--model.vocab_size", "32000", "--training.seq_len", "64", "--training.steps", "3"]
OWN_MAP = ["--pc.level", "2.616097,-3.550208,2.730920,-0.796809", "--checkpoint.last_save_model_only", "true"]
STAND_STILL = ["--optimizer.lr", "0.0", "--training.steps", "1", "--checkpoint.interval", "1"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("text"), "mistral-common")


@pytest.fixture(scope="module")
def train(tmp_path_factory, shards):
    """train(*overrides) on two ranks; returns the run's folder."""

    def run(*overrides):
        folder = tmp_path_factory.mktemp("run")
        config = tiny.write_config(folder / "config.toml", shards, folder)
        run_ranks(2, tiny.train, config, [*SETTINGS, *overrides])
        return folder

    return run


@pytest.fixture(scope="module")
def trained(train):
    return train()


@torch.no_grad()
def validation_loss(llama, shards):
    """Mean over the tokens that the run of `tiny.CONFIG` validates on."""
    loader = GlobalOrderLoader(
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
    # a logit is off by at most 32 float32 roundings (test_hugging_face), the mean over 768 tokens by far fewer
    assert found == pytest.approx(expected[-1], rel=2e-6)
    assert abs(expected[-1] - expected[0]) > 1e-3 * expected[0]  # control: another step is far outside


def test_export_and_scores(trained, shards, tmp_path, command):
    checkpoint, out = trained / "checkpoint" / "step-3", tmp_path / "out"
    before = os.umask(0o027)
    status, printed, errors = command("export_hf.py", checkpoint, out)
    os.umask(before)
    assert status == 0 and printed.strip() == str(out), errors
    assert {stat.filemode(path.stat().st_mode) for path in [out, *out.iterdir()]} == {"drwxr-x---", "-rw-r-----"}
    require_same_validation_loss(trained, out, shards)
    sets = make_evaluation_data(tmp_path / "sets")
    words = ["--data", sets, "--output", tmp_path / "scores", "--tasks", "piqa,arc_easy"]
    status, _, errors = command("score.py", f"run={checkpoint}", f"export={out}", *words)
    assert status == 0, errors
    of_run, of_export = (json.loads((tmp_path / "scores" / f"{name}.json").read_text()) for name in ("run", "export"))
    assert of_run["tasks"] == of_export["tasks"] and set(of_run["tasks"]) == {"piqa", "arc_easy"}
    assert of_run["model_sha256"] != of_export["model_sha256"]
    assert {path.name for path in (tmp_path / "scores").iterdir()} >= {"table.md", "table.csv", "table.png"}


def test_generate_is_repeatable(trained, command):
    words = ["generate.py", trained / "checkpoint" / "step-3", "The river", "--max-new-tokens", 8]
    texts = [command(*words, "--temperature", temperature)[1] for temperature in (0.8, 0.8, 0)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("The river") and len(texts[0]) > len("The river\n")


def test_export_of_a_model_only_checkpoint_with_a_custom_map(train, tmp_path, shards):
    folder = train(*OWN_MAP)
    require_same_validation_loss(
        folder, hugging_face.export(folder / "checkpoint" / "step-3", tmp_path / "out"), shards
    )


def test_an_export_starts_a_run(trained, train, tmp_path):
    """With a learning rate of 0 a run saves its initial weights: W is chosen so that PC(W) equals them."""
    out = hugging_face.export(trained / "checkpoint" / "step-3", tmp_path / "out")
    start = ["--checkpoint.initial_load_in_hf", "true", "--checkpoint.initial_load_path", str(out)]
    second = CheckpointFolder(train(*STAND_STILL, *start) / "checkpoint" / "step-1")
    expected = plain_weights.load(trained / "checkpoint" / "step-3").weights
    preconditioned = [key for key in expected if f"{key}_orig" in second.shapes()]
    assert len(preconditioned) == 8
    for key, tensor in second.read_tensors(list(expected)).items():
        # a float64 decomposition, then PC in float32: some 1e-6 of the largest entry; W itself differs by far more
        tolerance = 1e-5 * tensor.abs().max().item() if key in preconditioned else 0.0
        torch.testing.assert_close(tensor, expected[key], rtol=0.0, atol=tolerance)
    for key in preconditioned:
        orig = second.read_tensors([f"{key}_orig"])[f"{key}_orig"]
        assert (orig - expected[key]).abs().max() > 1e-3

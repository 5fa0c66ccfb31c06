"""A checkpoint is read completely or not at all."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pc import UserError
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.evaluate import plain_weights
from pc_recipe.report.spectra import both_weights


@pytest.fixture
def copied(tmp_path, pc_run):
    """A copy of the run that a test may damage; returns its checkpoint."""
    shutil.copytree(pc_run.checkpoint.parent.parent, tmp_path / "run")
    return tmp_path / "run" / "checkpoint" / "step-7"


def rewritten(folder, change):
    """Save the checkpoint again with its entries changed."""
    reader = CheckpointFolder(folder)
    entries = reader.read_tensors([key for key, shape in reader.shapes().items() if shape is not None])
    entries |= {"method": {"fingerprint": reader.read_value("method.fingerprint")}}
    change(entries)
    shutil.rmtree(folder)
    dcp.save(entries, checkpoint_id=str(folder), no_dist=True)


def same(weights, model):
    expected = model.state_dict()
    return weights.keys() == expected.keys() and all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: e.pop("layers.3.feed_forward.w2.weight_u"),
            r"tensor layers\.3\.feed_forward\.w2\.weight_u is missing",
        ),
        (lambda e: e.update({"layers.9.w": torch.ones(2)}), r"tensor layers\.9\.w does not belong"),
        (lambda e: e.update({"norm.weight": torch.ones(5)}), r"tensor norm\.weight has shape \[5\].*\[256\]"),
        (lambda e: e["method"].update(fingerprint='{"enable": false}'), r"tensor .*weight_gamma does not belong"),
    ],
)
def test_every_tensor_is_accounted_for(copied, change, message):
    rewritten(copied, change)
    with pytest.raises(UserError, match=message):
        plain_weights.load(copied)


def test_a_checkpoint_of_the_model_alone(copied, pc_run):
    def only_the_model(entries):
        for key in [key for key in entries if "weight_" in key or key == "method"]:
            del entries[key]

    rewritten(copied, only_the_model)
    loaded = plain_weights.load(copied)
    assert same(loaded.weights, pc_run.model)
    assert loaded.method.enable  # it holds PC(W), though nothing of PC
    [(which, weights)] = both_weights(copied).items()
    assert which == "PC(W)" and same(weights, pc_run.model)


def test_no_checkpoint_at_all(copied, tmp_path):
    for path, message in [
        (tmp_path / "nowhere", "no such checkpoint"),
        (tmp_path, "not a checkpoint"),
        (copied.parent, r"the newest one in it is .*step-7$"),
    ]:
        with pytest.raises(UserError, match=message):
            plain_weights.load(path)


def test_a_run_stands_for_its_newest_complete_checkpoint(copied, pc_run, capsys):
    (copied.parent / "step-9").mkdir()  # incomplete
    assert same(plain_weights.load(copied.parent.parent).weights, pc_run.model)
    assert "its newest checkpoint is step-7" in capsys.readouterr().err

"""A checkpoint is read completely or not at all, and nothing in it is executed."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from pc import UserError
from pc_recipe.evaluate import plain_weights
from pc_recipe.files.run_folder import CHECKSUMS
from pc_recipe.train.checkpoint_folder import CheckpointFolder


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


def test_weights_are_the_trainers(pc_run):
    run = plain_weights.load(pc_run.checkpoint)
    assert same(run.weights, pc_run.model)
    assert (run.step, run.method.level, run.model_args.max_seq_len) == (7, 4, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("layers.1.attention.wk.weight"), r"tensor layers\.1\.attention\.wk\.weight is missing"),
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
    assert same(plain_weights.load(copied).weights, pc_run.model)


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


class Attack:
    """Pickles as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call, message",
    [
        ((exec, "open('executed', 'w')"), "builtins.exec"),
        ((getattr, Path, "unlink"), "getattr of <class .*Path'>"),
    ],
)
def test_index_is_not_executed(copied, call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (copied / CHECKSUMS).unlink()
    (copied / ".metadata").write_bytes(pickle.dumps(Attack(*call)))
    with pytest.raises(UserError, match=f"{message} does not belong"):
        plain_weights.load(copied)
    assert not (tmp_path / "executed").exists()


def test_an_index_written_by_python_3_11_2_is_read(copied):
    """It pickles the member of an enum as a call of getattr."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, _MEM_FORMAT_ENCODING):
                return getattr, (_MEM_FORMAT_ENCODING, value.name)
            return NotImplemented

    expected, index = CheckpointFolder(copied).shapes(), pickle.loads((copied / ".metadata").read_bytes())
    (copied / CHECKSUMS).unlink()
    index.storage_meta.modules = []
    with open(copied / ".metadata", "wb") as file:
        Pickler(file).dump(index)
    assert CheckpointFolder(copied).shapes() == expected

"""What a checkpoint holds is checked where it is read: one line names the checkpoint and the entry."""

import dataclasses
import io
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from helpers.ranks import run_ranks
from helpers.tiny import make_checkpoints
from pc.errors import UserError
from pc_recipe.checkpoints.folder import CheckpointFolder, Damaged
from pc_recipe.checkpoints.values import require_valid
from pc_recipe.files.errors import DiskFailed

GOOD = {
    "train_state.step": 6,
    "train_state.ntokens_seen": 192,
    "dataloader.position": 12,
    "dataloader.identity": '{"split": "train", "data.seed": 0}',
    "lr_scheduler.adamw.last_epoch": 6,
    "optimizer.param_groups.norm.weight.lr": 1e-3,
    "method.fingerprint": '{"enable": true, "level": 4, "model": {"dim": 8}, "tokenizer": {"name": "a", "sha256": "b"}}',
}
TEXTS = ("dataloader.identity", "method.fingerprint")
ODD = [(name, value) for name in GOOD for value in (None, [1], {"a": 1}, "x\n", b"{")]
ODD += [(name, value) for name in GOOD if name not in TEXTS for value in (-1, float("nan"), True, 10**30)]
ODD += [(name, 5.5) for name in GOOD if not name.endswith("lr")]
ODD += [(name, value) for name in TEXTS for value in ("[]", "{", "5", "null", "[" * 10**5)]
ODD += [
    ("dataloader.position", 2**62),
    ("dataloader.identity", '{"split": ["train"]}'),
    ("dataloader.identity", '{"split": "a\\nb"}'),
    ("method.fingerprint", '{"enable": "maybe"}'),
    ("method.fingerprint", '{"enable": true, "level": 99}'),
    ("method.fingerprint", '{"model": {"dim": "wide"}}'),
    ("method.fingerprint", '{"tokenizer": {"name": "a"}}'),
]


@pytest.mark.parametrize("name", GOOD)
def test_good_values(name):
    require_valid(name, GOOD[name])


def test_what_is_not_used_may_be_anything():
    require_valid("optimizer.param_groups.norm.weight.betas", (0.9, 0.95))
    require_valid("method.fingerprint", '{"a key of another version": 1}')


@pytest.mark.parametrize(("name", "value"), ODD, ids=lambda one: repr(one)[:40])
def test_odd_values(name, value):
    with pytest.raises(ValueError, match=name) as raised:
        require_valid(name, value)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 300, raised.value


def saved(value) -> bytes:
    torch.save(value, data := io.BytesIO())
    return data.getvalue()


def flipped(data: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in data[:64]) + data[64:]


class Other:
    """Harmless, but no plain value."""


FORMS = {
    "zeros": lambda data: bytes(len(data)),
    "flipped bytes": flipped,
    "cut": lambda data: data[: len(data) // 2],
    "an object": lambda data: saved({"x": Other()}),
    "a dictionary": lambda data: saved({"a": 1}),
    "a part of a larger one": lambda data: saved(torch.ones(41, 41)),
    "another shape": lambda data: saved(torch.ones(20, 80)),
    "another type": lambda data: saved(torch.ones(40, 40, dtype=torch.complex64)),
    "sparse": lambda data: saved(torch.eye(40).to_sparse()),
    "without values": lambda data: saved(torch.ones(40, 40, device="meta")),
}


def put(folder: Path, name: str, change) -> None:
    """Replace the bytes of an entry by `change(bytes)`, as somebody may who does not care for checksums."""
    index = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301
    key, info = next((key, info) for key, info in index.storage_data.items() if key.fqn == name)
    file = folder / info.relative_path
    content = file.read_bytes()
    new = change(content[info.offset : info.offset + info.length])
    new = new.ljust(info.length, b"\0") if new[:2] != b"PK" or len(new) < info.length else new
    index.storage_data[key] = dataclasses.replace(info, offset=len(content), length=len(new))
    file.write_bytes(content + new)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def save(rank, folder, steps=(6,)):
    for step in steps:
        state = {"w": torch.full((40, 40), float(step)), "v": torch.ones(3), "train_state": {"step": step}}
        dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_is_not_one(tmp_path, form):
    save(0, tmp_path)
    put(tmp_path / "step-6", "w", FORMS[form])
    folder = CheckpointFolder(tmp_path / "step-6")
    assert folder.read_tensors(["v"])["v"].tolist() == [1, 1, 1]
    with pytest.raises(Damaged) as raised:
        folder.read_tensors(["w"])
    assert str(raised.value).startswith(f"{tmp_path}/step-6/__0_0.distcp: w is damaged, or not the tensor")
    assert str(raised.value).isprintable()


def resume(rank, folder):
    manager, state = make_checkpoints(folder), {"w": torch.zeros(40, 40)}
    try:
        checkpoint = manager.newest_valid(lambda checkpoint: checkpoint.load(state))
    except UserError as error:
        return str(error)
    assert (state["w"] == checkpoint.step).all()  # what was loaded before is overwritten
    return checkpoint.path.name


def test_a_resume_goes_back_to_the_newest_checkpoint_that_loads(tmp_path):
    where = tmp_path / "checkpoint"
    save(0, where, steps=(2, 4, 6))
    put(where / "step-6", "w", FORMS["zeros"])
    put(where / "step-4", "train_state.step", lambda _: saved("x"))
    assert run_ranks(2, resume, tmp_path) == ["step-2"] * 2
    assert sorted(path.name for path in where.iterdir()) == ["step-2", "step-4.damaged", "step-6.damaged"]


def test_a_resume_ends_in_a_line_if_no_checkpoint_loads(tmp_path):
    where = tmp_path / "checkpoint"
    save(0, where, steps=(2, 4))
    for step in (2, 4):
        put(where / f"step-{step}", "w", FORMS["an object"])
    for line in run_ranks(2, resume, tmp_path):
        assert line.startswith(f"{where}/step-4/__0_0.distcp: w is damaged") and "no other checkpoint" in line
        assert line.isprintable()
    assert sorted(path.name for path in where.iterdir()) == ["step-2", "step-4"]


def test_too_little_memory_is_no_damage(tmp_path):
    """A good checkpoint must not be set aside."""
    save(0, tmp_path)
    full = MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for error in full:
        with patch.object(torch, "load", side_effect=error), pytest.raises(DiskFailed, match="more memory"):
            CheckpointFolder(tmp_path / "step-6").load({"w": torch.ones(40, 40)}, no_dist=True)


STATES = {
    "x is missing": {"x": torch.ones(1)},
    "w has shape [40, 40], this run needs [3]": {"w": torch.ones(3)},
    "train_state.step should be a tensor": {"train_state": {"step": torch.ones(())}},
    "w should not be a tensor": {"w": 5},
}


@pytest.mark.parametrize("says", STATES)
def test_a_state_that_is_not_in_the_checkpoint(tmp_path, says):
    save(0, tmp_path)
    with pytest.raises(UserError) as raised:
        CheckpointFolder(tmp_path / "step-6").load(STATES[says], no_dist=True)
    assert str(raised.value) == f"{tmp_path}/step-6: {says}"


def test_names_are_printed_so_they_are_printable(tmp_path):
    dcp.save({"a\nb": torch.ones(1)}, checkpoint_id=tmp_path / "step-6", no_dist=True)
    with pytest.raises(Damaged, match="is incomplete in the files"):
        CheckpointFolder(tmp_path / "step-6")

"""Every kind of damage to every file of a checkpoint is found before anything is used."""

import shutil
import subprocess
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import run_ranks
from pc.errors import UserError
from pc.titan import checkpoint
from pc.titan.checkpoint import Checkpoints
from pc.titan.checksums import CHECKSUMS, ChecksummedWriter, Damaged
from pc.titan.distcp import CheckpointFolder, LoadPlanner, Reader


def _save(rank, folder, seed):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2,))
    state = {f"w{i}": distribute_tensor(torch.randn(50, 30), mesh, [Shard(0)]) for i in range(3)}
    dcp.save(state | {"method": {"fingerprint": "{}"}}, storage_writer=ChecksummedWriter(folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two complete checkpoints of two ranks each."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20):
        run_ranks(2, _save, folder / "checkpoint" / f"step-{step}", step)
    return folder


def _flip(file, other):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a bit": _flip,
    "cut by half": lambda file, other: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "missing": lambda file, other: file.unlink(),
    "a byte more": lambda file, other: file.write_bytes(file.read_bytes() + b"x"),
    "another checkpoint's": lambda file, other: shutil.copy(other, file),
}
FILES = (".metadata", CHECKSUMS, "__0_0.distcp", "__1_0.distcp")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(saved, tmp_path, file, kind):
    shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint" / "step-20"
    CheckpointFolder(folder).verify()  # control
    DAMAGE[kind](folder / file, tmp_path / "checkpoint" / "step-10" / file)
    # without the index there is no checkpoint, which another test covers
    with pytest.raises(UserError if (file, kind) == (".metadata", "missing") else Damaged) as raised:
        CheckpointFolder(folder).read_tensors(["w0"])
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


def test_the_command_of_the_same_format_agrees(saved):
    if shutil.which("xxh128sum") is None:
        pytest.skip("xxh128sum is not installed; on Debian: apt-get install xxhash")
    subprocess.run(["xxh128sum", "-c", CHECKSUMS], cwd=saved / "checkpoint" / "step-10", check=True)


def test_a_checkpoint_without_checksums_is_read(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert torch.equal(CheckpointFolder(tmp_path / "step-1").read_tensors(["w"])["w"], torch.ones(3))


def test_values_are_not_executed(tmp_path):
    class Attack:
        def __reduce__(self):
            return (tmp_path / "executed").touch, ()

    dcp.save({"method": {"value": Attack()}}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(BaseException, match="weights_only|Weights only"):
        dcp.load(
            {"method": {"value": 0}},
            storage_reader=Reader(tmp_path / "step-1"),
            planner=LoadPlanner(),
            no_dist=True,
        )
    assert not (tmp_path / "executed").exists()


def _manager(folder, group):
    """Without a trainer."""
    manager = Checkpoints.__new__(Checkpoints)
    manager.enable, manager.folder, manager._group, manager.pg = True, str(folder), group, None
    manager.mp, manager.purge_thread, manager.stager = None, None, None
    return manager


def _chooses(rank, folder):
    manager = _manager(folder, dist.group.WORLD)
    if rank == 1:
        checkpoint.checkpoints = lambda folder: {10: folder / "step-10"}  # what this node still sees
    return manager.find(-1).path.name


def test_ranks_load_the_checkpoint_that_rank_0_sees(saved):
    assert run_ranks(2, _chooses, saved / "checkpoint") == ["step-20"] * 2


@pytest.mark.parametrize("mode", ["ASYNC", "ASYNC_WITH_PINNED_MEM"])
def test_an_asynchronous_save_does_not_copy_ahead(tmp_path, monkeypatch, mode):
    """Its thread has no device set, so that copying ahead on every rank would use GPU 0."""
    saves = []
    monkeypatch.setattr(checkpoint.dcp, "async_save", lambda *_, **arguments: saves.append(arguments) or Future())
    _manager(tmp_path, None).dcp_save({}, str(tmp_path / "step-30"), checkpoint.AsyncMode[mode])
    assert [save["storage_writer"].per_thread_copy_ahead for save in saves] == [0]

"""Every kind of damage to every file of a checkpoint is found before anything is used."""

import errno
import shutil
import subprocess
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import run_ranks
from pc.errors import UserError
from pc.titan import checkpoint, checksums
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


def _flip(where):
    def damage(file, other):
        content = bytearray(file.read_bytes())
        content[int(where * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return damage


def _zero_a_block(file, other):
    content = bytearray(file.read_bytes())
    start = len(content) // 3
    content[start : start + 16] = bytes(16)
    file.write_bytes(content)


DAMAGE = {
    "first byte": _flip(0),
    "a middle byte": _flip(0.5),
    "last byte": _flip(1),
    "zeros": _zero_a_block,
    "cut by one byte": lambda file, other: file.write_bytes(file.read_bytes()[:-1]),
    "cut by half": lambda file, other: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file, other: file.write_bytes(b""),
    "missing": lambda file, other: file.unlink(),
    "a byte more": lambda file, other: file.write_bytes(file.read_bytes() + b"\n"),
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
    if file == CHECKSUMS and kind in ("last byte", "cut by one byte", "a byte more"):
        CheckpointFolder(folder).verify()  # a line break more or less does not change the meaning
        return
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


# --- the manager ----------------------------------------------------------------------------------------


@pytest.fixture
def manager(saved, tmp_path, monkeypatch):
    """A manager of a copy of the two checkpoints, without a trainer."""
    shutil.copytree(saved / "checkpoint", tmp_path / "checkpoint")
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 0)
    manager = Checkpoints.__new__(Checkpoints)
    manager.enable, manager.folder, manager._group = True, str(tmp_path / "checkpoint"), None
    manager.keep_latest_k, manager._keep_every = 2, 0
    manager.mp, manager.purge_thread, manager.stager = None, None, None
    return manager


def test_the_newest_whole_one_is_chosen_and_the_damaged_is_named(manager, tmp_path, caplog):
    assert manager.newest_valid() == 20 and not (tmp_path / "checkpoint.damaged").exists()
    (tmp_path / "checkpoint" / "step-30").mkdir()  # what a kill during a save leaves
    _flip(0.5)(tmp_path / "checkpoint" / "step-20" / "__1_0.distcp", None)
    assert manager.newest_valid() == 10
    assert {p.name for p in (tmp_path / "checkpoint.damaged").iterdir()} == {"step-20", "step-30"}
    assert "step-20 is not used: " in caplog.text and "__1_0.distcp: damaged" in caplog.text
    caplog.clear()
    manager.remind()
    assert "step-20, step-30" in caplog.text
    # the same step again, when that name is taken
    (tmp_path / "checkpoint" / "step-20").mkdir()
    assert manager.newest_valid() == 10
    assert (tmp_path / "checkpoint.damaged" / "step-20.1").is_dir()


def _chooses(rank, folder):
    manager = Checkpoints.__new__(Checkpoints)
    manager.enable, manager.folder, manager._group = True, str(folder), dist.group.WORLD
    if rank == 1:
        manager.is_complete = lambda step: step == 10  # what this node still sees
    return manager.newest_valid()


def test_ranks_load_the_checkpoint_that_rank_0_sees(saved):
    assert run_ranks(2, _chooses, saved / "checkpoint") == [20, 20]


@pytest.mark.parametrize("mode", ["ASYNC", "ASYNC_WITH_PINNED_MEM"])
def test_an_asynchronous_save_does_not_copy_ahead(manager, tmp_path, monkeypatch, mode):
    """Its thread has no device set, so that copying ahead on every rank would use GPU 0."""
    saves = []
    monkeypatch.setattr(checkpoint.dcp, "async_save", lambda *_, **arguments: saves.append(arguments) or Future())
    manager.pg = None
    manager.dcp_save({}, str(tmp_path / "step-30"), checkpoint.AsyncMode[mode])
    assert [save["storage_writer"].per_thread_copy_ahead for save in saves] == [0]


def test_when_all_are_damaged_none_is_touched(manager, tmp_path):
    for step in (10, 20):
        _flip(0.5)(tmp_path / "checkpoint" / f"step-{step}" / "__0_0.distcp", None)
    with pytest.raises(Damaged, match="step-20.*no other checkpoint in .* is complete"):
        manager.newest_valid()
    assert not (tmp_path / "checkpoint.damaged").exists()


def test_what_is_kept(manager, tmp_path):
    manager.purge_queue = SimpleNamespace(put=shutil.rmtree)
    manager._keep_every = 30
    folder = tmp_path / "checkpoint"
    for step in (30, 40, 50):
        shutil.copytree(folder / "step-10", folder / f"step-{step}")
    for half in (15, 60):
        (folder / f"step-{half}").mkdir()
    manager._purge_stale_checkpoints()
    # every 30th, the two newest complete ones, and the incomplete one, which may be in progress
    assert sorted(p.name for p in folder.iterdir()) == ["step-30", "step-40", "step-50", "step-60"]


def test_a_full_disk_is_said_in_a_line_and_earlier_ones_stay(manager, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checksums._HashedFile, "write", full)
    state, new = {"w": torch.ones(3)}, tmp_path / "checkpoint" / "step-30"
    with pytest.raises(UserError, match=r"step-30 could not be written \(rank 0: No space left on device\)"):
        manager.dcp_save(state, str(new), checkpoint.AsyncMode.DISABLED)
    assert not new.exists() and manager.newest_valid() == 20


def test_an_overwritten_checkpoint_is_not_whole_meanwhile(manager, tmp_path, monkeypatch):
    seen = []
    original = ChecksummedWriter.write_data

    def look(self, *args, **kwargs):
        seen.append(manager.is_complete(20))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ChecksummedWriter, "write_data", look)
    manager.dcp_save({"w": torch.ones(3)}, str(tmp_path / "checkpoint" / "step-20"), checkpoint.AsyncMode.DISABLED)
    assert seen == [False] and manager.is_complete(20)
    CheckpointFolder(tmp_path / "checkpoint" / "step-20").verify()

"""Every kind of damage to every file of a checkpoint is found before anything is used."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.made_runs import save_checkpoint
from helpers.ranks import run_ranks
from pc.errors import UserError
from pc.settings import Config
from pc.titan import checkpoint
from pc.titan.checkpoint import Checkpoints
from pc.titan.checkpoint_folder import CHECKSUMS, CheckpointFolder, ChecksummedWriter, Damaged, LoadPlanner, Reader
from pc.titan.fingerprint import require_plain_weights
from pc.titan.job_config import JobConfig


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


def _manager(folder):
    """Of no trainer."""
    config = Config()
    config.job.dump_folder, config.checkpoint.enable = str(folder), True
    return Checkpoints(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None,
        checkpoint_config=JobConfig(config).checkpoint, base_folder=folder,
    )  # fmt: skip


def _chooses(rank, folder):
    manager = _manager(folder)
    if rank == 1:
        checkpoint.checkpoints = lambda folder: {10: folder / "step-10"}  # what this node still sees
    return manager.newest_valid().path.name


def test_ranks_load_the_checkpoint_that_rank_0_sees(saved):
    assert run_ranks(2, _chooses, saved) == ["step-20"] * 2


def test_raw_weights_of_schedule_forward_are_no_start(tmp_path):
    for schedule in ("step", None):
        save_checkpoint(tmp_path / f"{schedule}", schedule)
        require_plain_weights(CheckpointFolder(tmp_path / f"{schedule}" / "checkpoint" / "step-7"))
    save_checkpoint(tmp_path / "forward", "forward")
    with pytest.raises(UserError, match="holds raw weights"):
        require_plain_weights(CheckpointFolder(tmp_path / "forward" / "checkpoint" / "step-7"))

"""Every kind of damage to every file of a checkpoint is found before anything is used."""

import errno
import hashlib
import os
import re
import resource
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from helpers.ranks import run_ranks
from helpers.tiny import make_checkpoints
from pc.command import describe_end
from pc.errors import UserError
from pc_recipe.checkpoints.folder import UNCHANGED, CheckpointFolder, Damaged, LoadPlanner, Reader, plain_errors
from pc_recipe.checkpoints.writer import ChecksummedWriter
from pc_recipe.files import look
from pc_recipe.files.run_folder import CHECKSUMS, write_state
from pc_recipe.train import checkpoint


def _save(rank, folder, step):
    torch.manual_seed(step)
    mesh = init_device_mesh("cpu", (2,))
    state = {f"w{i}": distribute_tensor(torch.randn(50, 30), mesh, [Shard(0)]) for i in range(3)}
    state |= {"method": {"fingerprint": "{}"}, "train_state": {"step": step}}
    dcp.save(state, storage_writer=ChecksummedWriter(folder))


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
    # without the index there is no checkpoint (another test)
    with pytest.raises(UserError if (file, kind) == (".metadata", "missing") else Damaged) as raised:
        CheckpointFolder(folder).read_tensors(["w0"])
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["device", "socket", "elsewhere"])
def test_an_index_that_names_no_file_of_the_checkpoint_is_refused(tmp_path, kind):
    folder = tmp_path / "step-1"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    data = folder / "__0_0.distcp"
    data.unlink()
    if kind == "device":
        data.symlink_to("/dev/null")
    elif kind == "socket":
        os.mknod(data, stat.S_IFSOCK)
    else:
        index = folder / ".metadata"
        index.write_bytes(index.read_bytes().replace(b"__0_0.distcp", b"../../../abc"))
    with pytest.raises(UserError, match="which is (not a file of this checkpoint|a file outside of it)"):
        CheckpointFolder(folder)


def test_values_are_not_executed(tmp_path):
    class Attack:
        def __reduce__(self):
            return (tmp_path / "executed").touch, ()

    dcp.save({"method": {"value": Attack()}}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(BaseException, match="method.value is not a plain value"):
        dcp.load(
            {"method": {"value": 0}},
            storage_reader=Reader(tmp_path / "step-1"),
            planner=LoadPlanner(tmp_path / "step-1"),
            no_dist=True,
        )
    assert not (tmp_path / "executed").exists()


def _chooses(rank, folder):
    manager = make_checkpoints(folder)
    if rank == 1:
        checkpoint.run_folder.list_checkpoints = lambda folder: {10: folder / "step-10"}  # a stale view of the folder
    return manager.newest_valid().path.name


def test_ranks_load_the_checkpoint_that_rank_0_sees(saved):
    assert run_ranks(2, _chooses, saved) == ["step-20"] * 2


def _reads_a_bad_disk(rank, folder):
    def read():
        raise OSError(5, "made by the test", "metrics.jsonl")

    try:
        make_checkpoints(folder, enable=False).call_together(read)
    except UserError as error:
        return f"{describe_end(error)[0]}: {error}"


def test_a_disk_that_fails_is_reported_without_checkpoints_too(tmp_path):
    (said,) = run_ranks(1, _reads_a_bad_disk, tmp_path)
    assert said == f"failed: {tmp_path}/checkpoint: cannot be used (metrics.jsonl: made by the test)"


def _newest(rank, folder, failures=()):
    """The name of the newest valid checkpoint, or the error; the first reads of data files fail with `failures`."""
    failures, digest = list(failures), hashlib.file_digest

    def fails_first(file, kind):
        if failures and str(file.name).endswith(".distcp"):
            raise OSError(failures.pop(0), "made by the test")
        return digest(file, kind)

    manager = make_checkpoints(folder)
    with (
        patch.object(hashlib, "file_digest", fails_first),
        patch.object(look, "PAUSES", (0.0, 0.0)),
    ):
        try:
            return manager.newest_valid().path.name
        except UserError as error:
            return f"{type(error).__name__}: {error}"


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize(
    "failures, answer",
    [
        ([errno.EIO], "step-20"),
        ([errno.EIO] * 20, "ReadFailed: .*step-20/__[01]_0.distcp: could not be read .*"),
        ([errno.EACCES] * 20, "ReadFailed: .*step-20/__[01]_0.distcp: could not be read .*"),
    ],
    ids=["once", "always", "of another user"],
)
def test_a_file_that_cannot_be_read_is_not_damaged(copied, failures, answer):
    assert re.fullmatch(answer, run_ranks(1, _newest, copied, failures)[0])
    assert _names(copied / "checkpoint") == ["step-10", "step-20"]


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _newest_and_what_is_said(rank, folder):
    with patch.object(checkpoint.logger, "warning") as warning:
        return _newest(rank, folder), warning.call_args[0][0]


def test_what_is_not_used_is_renamed_and_counted(copied):
    """Of incomplete checkpoints only the newest is kept; damaged ones are all kept, under a free name."""
    where = copied / "checkpoint"
    for name in ("step-5", "step-30", "step-40", "step-20.damaged", "step-30.mine"):
        (where / name).mkdir()
    (where / "step-20.damaged" / ".metadata").touch()
    says = f"{where} keeps 2 damaged or incomplete checkpoints, not used: step-20.damaged, step-40.damaged"
    assert run_ranks(1, _newest_and_what_is_said, copied) == [("step-20", says)]
    assert _names(where) == ["step-10", "step-20", "step-20.damaged", "step-30.mine", "step-40.damaged"]
    _flip(where / "step-20" / "__0_0.distcp", None)
    whole = {path.name: path.read_bytes() for path in (where / "step-20").iterdir()}
    (where / "step-50").mkdir()
    assert run_ranks(1, _newest, copied) == ["step-10"]
    kept = ["step-20.damaged", "step-20.damaged.damaged", "step-30.mine", "step-50.damaged"]
    assert _names(where) == ["step-10", *kept]
    assert {path.name: path.read_bytes() for path in (where / "step-20.damaged.damaged").iterdir()} == whole


def _newest_where_nothing_is_renamed(rank, folder):
    with patch.object(Path, "rename", side_effect=OSError(errno.EIO, "made by the test", "step-30")):
        return _newest(rank, folder)


def test_nothing_is_removed_before_the_rename_is_done(copied):
    where = copied / "checkpoint"
    for name in ("step-30", "step-1.damaged", "step-2.damaged"):
        (where / name).mkdir()
    (answer,) = run_ranks(1, _newest_where_nothing_is_renamed, copied)
    assert answer == f"DiskFailed: {where}: cannot be used (step-30: made by the test)"
    assert _names(where) == ["step-1.damaged", "step-10", "step-2.damaged", "step-20", "step-30"]


def test_a_linked_folder_of_another_disk(copied, tmp_path):
    """A checkpoint that is set aside stays on its disk; /dev/shm is another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        elsewhere = shutil.move(copied / "checkpoint", f"{disk}/checkpoint")
        (copied / "checkpoint").symlink_to(elsewhere)
        _flip(copied / "checkpoint" / "step-20" / "__0_0.distcp", None)
        assert run_ranks(1, _newest, copied) == ["step-10"]
        assert _names(Path(elsewhere)) == ["step-10", "step-20.damaged"]


def _renamed(folder):
    (folder / "step-20").rename(folder / "step-60")


def _copied(folder):
    shutil.copytree(folder / "step-20", folder / "step-60")


def _linked(folder):
    (folder / "step-60").symlink_to("step-20")


@pytest.mark.parametrize("give", [_renamed, _copied, _linked])
def test_a_number_that_is_not_the_step_ends_the_start(copied, give):
    """Otherwise each start would train the same steps again, and a purge would delete newer checkpoints as older ones."""
    where = copied / "checkpoint"
    give(where)
    before = _names(where)
    (answer,) = run_ranks(1, _newest, copied)
    assert answer == f"UserError: {where}/step-60 holds step 20: rename it to step-20, or delete it"
    assert _names(where) == before
    with pytest.raises(UserError, match="holds step 20"):
        CheckpointFolder(where / "step-60").read_tensors(["w0"])


def test_a_name_without_a_number_says_nothing_of_the_step(copied):
    assert CheckpointFolder(shutil.copytree(copied / "checkpoint" / "step-20", copied / "best")).step == 20


def _without_hidden_files(folder):
    for file in folder.glob("checkpoint/*/.metadata"):
        file.unlink()


def _all_cut(folder):
    for file in folder.glob("checkpoint/*/__0_0.distcp"):
        file.write_bytes(file.read_bytes()[:-1])


def _without_a_disk(folder):
    run_ranks(1, _newest, folder)  # records for later starts that there was a checkpoint
    shutil.rmtree(folder / "checkpoint")


def _with_a_link_to_nothing(folder):
    _without_a_disk(folder)
    (folder / "checkpoint").symlink_to(folder / "gone")


def _stopped_and_gone(folder):
    shutil.rmtree(folder / "checkpoint")
    write_state(folder, "stopped", 20, 100)


def _with_parts_of_several(folder):
    for file in folder.glob("checkpoint/*/[.X]*"):
        file.unlink()


LOST = {
    _all_cut: r"Damaged: .*step-20/__0_0.distcp: damaged, .*; no other checkpoint in .* is complete and undamaged",
    _without_hidden_files: r"Damaged: .*step-20/.metadata: missing, as after a copy without hidden files",
    _without_a_disk: r"UserError: .* has had a checkpoint, and .*/checkpoint has no complete one \(0 incomplete\)\. Bring",
    _with_a_link_to_nothing: r"DiskFailed: .*/checkpoint: cannot be used .*File exists",
    _stopped_and_gone: r"UserError: .* has had a checkpoint, and ",
    _with_parts_of_several: r"UserError: .* has no complete one \(2 incomplete\)",
}


@pytest.mark.parametrize("lose", LOST)
def test_a_run_never_goes_back_to_its_first_step_by_itself(copied, lose):
    lose(copied)
    before = [path for path in sorted(copied.glob("**/*")) if path.is_file()]
    (answer,) = run_ranks(1, _newest, copied)
    assert re.match(LOST[lose], answer), answer
    assert "Damaged" not in answer or "Bring one back" in answer
    assert [path for path in sorted(copied.glob("**/*")) if path.is_file()] == before


def _begins_anew(rank, folder):
    return make_checkpoints(folder).newest_valid() is None


@pytest.mark.parametrize("state", ["running", "failed"])
@pytest.mark.parametrize("left", [(), ("XXH128SUMS", ".metadata.tmp")], ids=["early", "before the index got its name"])
def test_a_crash_before_the_first_checkpoint_loses_nothing(tmp_path, state, left):
    """Also for a run that began at step 700 of another run; a kill during a save leaves a partial checkpoint."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 701, "time": 1e9}\n{"step": 1100, "time": 1.1e9}\n')
    write_state(tmp_path, state, 700, 2000)
    (tmp_path / "checkpoint" / "step-500").mkdir(parents=True)
    for name in left:
        (tmp_path / "checkpoint" / "step-500" / name).touch()
    assert run_ranks(1, _begins_anew, tmp_path) == [True]
    assert _names(tmp_path / "checkpoint") == ["step-500.damaged"]


def test_a_run_that_finished_without_checkpoints_has_had_none(tmp_path):
    (tmp_path / "config.toml").write_text("[checkpoint]\nenable = false\n")
    write_state(tmp_path, "finished", 100, 100)
    assert run_ranks(1, _begins_anew, tmp_path) == [True]


def _newest_without_rights(rank, folder):
    manager = make_checkpoints(folder)
    is_root = os.geteuid() == 0
    if is_root:  # root may write everywhere
        os.seteuid(65534)
    try:
        return str(manager.newest_valid())
    except UserError as error:
        return str(error)
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("kind", ["none", "whole", "damaged"])
def test_a_folder_that_is_not_writable_is_noticed_at_the_start(saved, kind):
    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to other users
        folder = Path(place, "run")
        folder.mkdir()
        if kind != "none":
            shutil.copytree(saved / "checkpoint", folder / "checkpoint")
        if kind == "damaged":
            _flip(folder / "checkpoint" / "step-20" / "__0_0.distcp", None)
        for path in (folder.parent, folder, *folder.glob("**/*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            answers = run_ranks(2, _newest_without_rights, folder)
        finally:
            for path in (folder.parent, folder, *folder.glob("**/")):
                path.chmod(0o755)
        for answer in answers:
            assert answer.startswith(f"{folder}/checkpoint") and "Permission denied" in answer and "\n" not in answer
        assert not list(folder.glob("**/*.damaged"))


def _newest_of_a_folder_that_is_not_listed(rank, folder, number):
    manager = make_checkpoints(folder)
    for ask, answer in (("exists", False), ("is_file", False), ("glob", ())):
        setattr(Path, ask, lambda *_, answer=answer, **__: answer)  # like Python 3.14 when the system refuses

    def refused(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    with patch.object(os, "listdir", refused), patch.object(os, "scandir", refused), patch.object(look, "PAUSES", ()):
        try:
            return manager.newest_valid()
        except UserError as error:
            return f"{describe_end(error)[0]}: {error}"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(copied, number):
    said = run_ranks(2, _newest_of_a_folder_that_is_not_listed, copied, number)
    assert said == [f"failed: {copied}/checkpoint: could not be read ({os.strerror(number)}); nothing was changed"] * 2


def _save_with_little_disk(rank, folder):
    """{bytes that fit into each file: "saved" or the error}"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = {}
    for limit in range(0, 70_000, 997):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with plain_errors("step-1"):
                dcp.save({f"w{i}": torch.ones(50 * i) for i in range(20)}, storage_writer=ChecksummedWriter(folder))
            said[limit] = "saved"
        except UserError as error:
            said[limit] = f"{describe_end(error)[0]}: {error}"
        except BaseException as error:
            said[limit] = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return said


def test_a_disk_that_fills_at_any_byte_is_one_line(tmp_path):
    """Limits cover the small files too, which are written last: the index and the checksums."""
    (said,) = run_ranks(1, _save_with_little_disk, tmp_path / "step-1")
    expected = f"failed: step-1: File too large (rank 0); {UNCHANGED}"
    assert set(said.values()) - {"saved"} == {expected} and said[69_790] == "saved", said


def _purge_without_its_thread(rank, folder):
    """As if the thread were killed before it began; returns what it would have deleted."""
    manager, paths = make_checkpoints(folder), []
    manager.keep_latest_k, manager._saving = 1, Path("step-20")
    with patch.object(manager, "purge_queue", SimpleNamespace(put=paths.append)):
        manager._purge_stale_checkpoints()
    return paths


def test_a_purge_that_is_killed_leaves_nothing_that_looks_whole(copied):
    for _ in range(2):  # the next purge deletes what is left
        assert run_ranks(1, _purge_without_its_thread, copied) == [[str(copied / "checkpoint" / "step-10.purged")]]
        assert _names(copied / "checkpoint") == ["step-10.purged", "step-20"]
        assert run_ranks(1, _newest, copied) == ["step-20"]


def test_a_purge_counts_no_checkpoint_of_a_later_step(copied):
    """Otherwise the one that was just saved would be the oldest."""
    for step in (30, 40):
        shutil.copytree(copied / "checkpoint" / "step-10", copied / "checkpoint" / f"step-{step}")
    assert run_ranks(1, _purge_without_its_thread, copied) == [[str(copied / "checkpoint" / "step-10.purged")]]
    assert _names(copied / "checkpoint") == ["step-10.purged", "step-20", "step-30", "step-40"]


def _purge_where_step_10_is_not_renamed(rank, folder):
    rename = Path.rename

    def refuse(path, to):
        if path.name == "step-10":
            raise OSError(errno.EXDEV, "made by the test", path)
        return rename(path, to)

    with patch.object(Path, "rename", refuse):
        return _purge_without_its_thread(rank, folder)


def test_a_checkpoint_that_cannot_be_purged_keeps_no_other(copied):
    shutil.copytree(copied / "checkpoint" / "step-10", copied / "checkpoint" / "step-15")
    expected = str(copied / "checkpoint" / "step-15.purged")
    assert run_ranks(1, _purge_where_step_10_is_not_renamed, copied) == [[expected]]
    assert _names(copied / "checkpoint") == ["step-10", "step-15.purged", "step-20"]

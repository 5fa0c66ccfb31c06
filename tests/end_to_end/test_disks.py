"""The worker's command on disks that fill, break and refuse: what is lost, the error, and how the run continues."""

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from unittest.mock import patch

import pytest

from helpers import tiny
from helpers.ranks import run_ranks
from pc_recipe.files.run_folder import list_complete

SMALL = ["--model.n_layers=1", "--training.global_batch_size=2", "--validation.enable=false"]
SMALL += ["--training.steps=5", "--checkpoint.interval=1"]


def _worker(rank, words, after_step=None, happens=()):
    """The status and stderr of the worker's command. `happens`, a function and its arguments, is called after a step."""
    from pc_recipe.runs import worker

    class Trainer(tiny.trainer_class()):
        def train_step(self, data):
            super().train_step(data)
            if self.step == after_step:
                happens[0](*happens[1:])

    said, status = io.StringIO(), 0
    with (
        patch.object(worker, "Trainer", Trainer),
        patch.object(sys, "argv", ["worker", *words]),
        patch.object(os, "_exit", sys.exit),
        patch.object(worker.dist, "destroy_process_group"),  # the helper destroys it
        contextlib.redirect_stderr(said),
    ):
        try:
            worker.main()
        except SystemExit as end:
            status = end.code
    return status, said.getvalue()


def _fails(*arguments) -> str:
    """The line with which the command fails."""
    ((status, said),) = run_ranks(1, _worker, *arguments)
    line = said.splitlines()[-1]
    assert status == 1 and line.startswith("failed: ") and "Traceback" not in said, said
    return line


def _goes_on(words, folder) -> list[float]:
    """All losses of the run's log."""
    ((status, said),) = run_ranks(1, _worker, words)
    assert status == 0 and json.loads((folder / "status.json").read_text())["state"] == "finished", said
    return tiny.metrics(folder)


def _complete(folder) -> list[int]:
    return list(list_complete(folder / "checkpoint"))


@pytest.mark.parametrize("mode, fails_first", [("disabled", "step-1"), ("async", "metrics.jsonl")])
def test_a_disk_that_fills_after_a_step(tiny_config, mode, fails_first):
    """A partial checkpoint must not keep the disk full, also if another write fails before the failed save is noticed."""
    config, folder = tiny_config
    folder.mkdir()
    if fails_first == "metrics.jsonl":
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "long": "x" * 30_000}) + "\n")
    words = [str(config), *SMALL, f"--checkpoint.async_mode={mode}"]
    full = resource.setrlimit, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)
    assert fails_first in _fails(words, 1, full)
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    assert not list(folder.glob("checkpoint/*"))
    _goes_on(words, folder)


SUDO = [] if os.geteuid() == 0 else ["sudo", "-n"]


@pytest.fixture
def mount():
    """mount(folder, option, ...) mounts a file system until the test ends. It needs root or sudo."""
    folders = []

    def mount(folder, *options):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run([*SUDO, "mount", *options, folder], check=True, capture_output=True, text=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"mount {' '.join(options)}: {getattr(error, 'stderr', error)}")
        folders.append(folder)

    yield mount
    for folder in folders:
        subprocess.run([*SUDO, "umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory):
    """The losses and the folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny.write_config(folder / "tiny.toml", tiny_shards, folder / "run")
    run_ranks(1, tiny.train, config, SMALL)
    return tiny.metrics(folder / "run"), folder / "run"


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_small_file_system_that_becomes_full(tiny_config, mount, undisturbed, mode):
    config, folder = tiny_config
    one = sum(file.stat().st_size for file in (undisturbed[1] / "checkpoint" / "step-2").iterdir())
    mount(folder / "checkpoint", "-t", "tmpfs", "-o", f"size={5 * one // 2},mode=777", "none")
    words = [str(config), *SMALL, f"--checkpoint.async_mode={mode}"]
    assert os.strerror(errno.ENOSPC) in _fails(words)
    assert _complete(folder) == [1, 2] and not (folder / "checkpoint" / "step-3").exists()
    subprocess.run([*SUDO, "mount", "-o", f"remount,size={9 * one}", folder / "checkpoint"], check=True)
    assert _goes_on(words, folder) == undisturbed[0]


def test_a_file_system_that_breaks_under_a_run(tiny_config, tmp_path, mount, undisturbed):
    """ext4 refuses all writes once its disk has failed; `abort` simulates that."""
    if not shutil.which("mkfs.ext4"):
        pytest.skip("no mkfs.ext4")
    config, folder = tiny_config
    disk = tmp_path / "disk"
    with open(disk, "wb") as file:
        file.truncate(16 * 2**20)
    owner = f"root_owner={os.getuid()}:{os.getgid()}"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", owner, disk], check=True)
    mount(folder / "checkpoint", "-o", "loop", str(disk))
    words = [str(config), *SMALL]
    fails = subprocess.run, [*SUDO, "mount", "-o", "remount,abort", str(folder / "checkpoint")]
    assert os.strerror(errno.EROFS) in _fails(words, 2, fails)
    # a new start fails too, because nothing could be saved
    assert os.strerror(errno.EROFS) in _fails(words) and tiny.metrics(folder) == undisturbed[0][:2]
    subprocess.run([*SUDO, "umount", folder / "checkpoint"], check=True)
    subprocess.run([*SUDO, "mount", "-o", "loop", disk, folder / "checkpoint"], check=True)
    assert _complete(folder) == [1]  # saved a moment before
    assert _goes_on(words, folder) == undisturbed[0]


def test_checkpoints_in_the_lower_layer_of_an_overlay(tiny_config, tmp_path, mount, undisturbed):
    """As in a container image, they cannot be renamed. The error says so, and other checkpoints are still deleted."""
    config, folder = tiny_config
    lower, upper, seen = tmp_path / "lower", tmp_path / "upper", folder / "checkpoint"
    for step in (1, 2):
        shutil.copytree(undisturbed[1] / "checkpoint" / f"step-{step}", lower / f"step-{step}")
    (lower / "step-2" / "__0_0.distcp").write_bytes(b"damaged")
    mount(upper, "-t", "tmpfs", "-o", "mode=777", "none")
    for name in ("changes", "work"):
        (upper / name).mkdir()
    layers = f"lowerdir={lower},upperdir={upper}/changes,workdir={upper}/work,redirect_dir=off"
    mount(seen, "-t", "overlay", "-o", layers, "none")
    words = [str(config), *SMALL, "--checkpoint.keep_latest_k=2"]
    assert f"{seen}/step-2: {os.strerror(errno.EXDEV)}" in _fails(words)
    assert sorted(path.name for path in seen.iterdir()) == ["step-1", "step-2"]
    shutil.rmtree(seen / "step-2")
    assert _goes_on(words, folder) == undisturbed[0][1:]
    assert sorted(path.name for path in seen.iterdir()) == ["step-1", "step-3", "step-4", "step-5"]

"""Each file system call of a save, a resume or a purge is refused, once or always."""

import builtins
import errno
import hashlib
import io
import os
import queue
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import AsyncMode

from helpers.ranks import run_ranks
from helpers.tiny import make_checkpoints
from pc.command import describe_end
from pc.errors import UserError
from pc_recipe.checkpoints import writer
from pc_recipe.files import look
from pc_recipe.files.run_folder import list_complete

ASKS = ("stat", "listdir", "scandir", "mkdir", "rename", "replace", "unlink", "rmdir", "open")
READS = {"stat", "listdir", "open r", "read"}


class Disk:
    """Records (call, file) in a folder; refuses the call `refused` `times` times after letting it through `let` times."""

    def __init__(self, folder, refused=None, number=0, times=0, let=0):
        self.folder, self.refused, self.number, self.left, self.let = folder, refused, number, times, let
        self.calls = []

    def note(self, call, path):
        path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not path.startswith(str(self.folder)):
            return
        self.calls.append((call, re.sub(r"\.[0-9a-f]{16}$", "", os.path.relpath(path, self.folder))))
        if self.calls[-1] == self.refused and self.left and self.calls.count(self.refused) > self.let:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), path)

    def __enter__(self):
        self.patches = ExitStack()
        for name in ASKS:
            self._wrap(os, name, lambda path, *_, name=name, **__: self.note(name, path))
        self._wrap(os, "fsync", lambda file: self.note("fsync", os.readlink(f"/proc/self/fd/{file}")))
        for module in (builtins, io):
            self._wrap(module, "open", lambda path, mode="r", *_, **__: self.note(f"open {mode[0]}", path))
        self._wrap(hashlib, "file_digest", lambda file, _: self.note("read", file.name))
        self._wrap(writer._HashedFile, "write", lambda file, _: self.note("write", file.name))
        return self

    def _wrap(self, owner, name, note):
        real = getattr(owner, name)

        def noted(*arguments, **options):
            note(*arguments, **options)
            return real(*arguments, **options)

        self.patches.enter_context(patch.object(owner, name, noted))

    def __exit__(self, *_):
        self.patches.close()


def _state(step):
    return {"w": torch.full((40, 30), float(step)), "method": {"fingerprint": "{}"}}


def _save(manager):
    manager.dcp_save(_state(40), f"{manager.folder}/step-40", AsyncMode.DISABLED)
    return 40


def _resume(manager):
    newest, state = manager.newest_valid(), _state(0)
    newest.load(state)
    return int(state["w"][0, 0])


def _purge(manager):
    manager.keep_latest_k, manager.purge_queue, manager._saving = 2, queue.Queue(), Path("step-30")
    manager._purge_stale_checkpoints()
    while not manager.purge_queue.empty():
        shutil.rmtree(manager.purge_queue.get(), ignore_errors=True)  # like TorchTitan's thread
    return 30


def _bytes(folder):
    return {path: {file.name: file.read_bytes() for file in path.iterdir()} for path in list_complete(folder).values()}


def _refuse_each(rank, root, action, number, times):
    """(the calls, each of which was refused in turn; what went wrong)"""
    look.PAUSES = (0.0, 0.0)
    manager = make_checkpoints(root, keep_latest_k=0)
    fresh = root / "fresh"
    for step in (10, 20, 30):
        dcp.save(_state(step), storage_writer=writer.ChecksummedWriter(fresh / f"step-{step}"))
    (fresh / "step-35").mkdir()  # left by a killed save

    def act(disk):
        shutil.rmtree(manager.folder, ignore_errors=True)
        shutil.copytree(fresh, manager.folder)
        before = _bytes(manager.folder)
        with disk:
            try:
                found = action(manager)
            except UserError as error:
                found = describe_end(error)[0]
        kept = _bytes(manager.folder)
        return found, [path.name for path in list(before)[-2:] if kept.get(path) != before[path]]

    disk = Disk(Path(manager.folder))
    usual, _ = act(disk)
    calls, wrong = list(dict.fromkeys(disk.calls)), []
    # for repeated calls, refuse the last one too: a file is hashed before its tensors are read
    last = [(call, disk.calls.count(call) - 1) for call in calls if times == 1 and disk.calls.count(call) > 1]
    for call, let in [*((call, 0) for call in calls), *last]:
        try:
            found, changed = act(Disk(Path(manager.folder), call, number, times, let))
            fine = found in (usual, "failed") and not changed and _resume(manager) >= 30
            reads = action is _resume and call[0] in READS and call != ("stat", ".")  # `mkdir` does this one
            if not fine or (times == 1 and reads and found != usual):
                wrong.append((call, let, found, changed))
        except BaseException as error:
            wrong.append((call, let, f"{type(error).__name__}: {error}"))
    return calls, wrong


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("action", [_save, _resume, _purge])
def test_a_refused_call_ends_in_a_line_and_harms_no_checkpoint(tmp_path, action, number, times):
    ((calls, wrong),) = run_ranks(1, _refuse_each, tmp_path, action, number, times)
    assert len(calls) >= 8 and not wrong, (calls, wrong)
    # a saved checkpoint survives a power cut: its folder is synced after the last rename in it
    assert action is not _save or calls[-1] == ("fsync", "step-40")

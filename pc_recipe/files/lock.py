"""The lock of a run's folder: one run trains in it at a time."""

import contextlib
import errno
import fcntl
import os
import time
import warnings
from pathlib import Path
from typing import TextIO

from pc.errors import UserError
from pc_recipe.files import look
from pc_recipe.files.errors import ReadFailed
from pc_recipe.files.inside import require_plain

_LOCKS = ("lock", "lock.ranks")
"""The launcher holds the first alone; the run's ranks share the second."""


def is_locked(folder: Path) -> bool:
    """Whether a process that called `lock` or `join_lock` is alive; True if only the folder's owner can tell."""
    return any(_is_held(folder / name) for name in _LOCKS)


def _is_held(file: Path) -> bool:
    if not look.is_there(file):
        return False
    try:
        with _open_lock(file, os.O_RDWR) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # also on a file system without locks, or mounted read-only
        if error.errno in (errno.EIO, errno.ESTALE):
            raise ReadFailed(f"{file}: could not be read ({error.strerror})") from error
        return isinstance(error, BlockingIOError | PermissionError)
    return False


def _open_lock(file: Path, flags: int = os.O_RDWR | os.O_CREAT) -> TextIO:
    """Only its owner can open it: anyone who can read a file can lock it, and so keep its owner from training."""
    return os.fdopen(os.open(file, flags | os.O_APPEND | os.O_NOFOLLOW, 0o600), "a")


def _create_lock(file: Path) -> TextIO:
    file.parent.mkdir(parents=True, exist_ok=True)
    require_plain(file.parent)  # before anything is written there
    try:
        opened = _open_lock(file)
    except PermissionError:
        raise UserError(f"{file} belongs to another user, who alone may train in this folder") from None
    with contextlib.suppress(OSError):  # a file system without modes
        os.fchmod(opened.fileno(), 0o600)  # older versions made it readable for all
    return opened


def lock(folder: Path, seconds: float = 1) -> TextIO:
    """Keep other processes from training in the same folder. Pass the open file on to the trainer's process.

    The lock lasts while any process holds the file open, or a rank that called `join_lock` lives. So it stays when the
    launcher is killed and ranks still train. The file's modification time is the start of the newest attempt.

    Args:
        seconds: to wait for another process, such as one in `is_locked`, which holds the lock for a moment.

    Raises:
        UserError: another process trains there, or `require_plain` refuses the folder.
    """
    launcher, ranks = (folder / name for name in _LOCKS)
    file = _create_lock(launcher)  # stays open during the run
    for tries_left in reversed(range(round(10 * seconds))):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_held(ranks):
                break
        except BlockingIOError:
            pass
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no second trainer there", stacklevel=2)
            break
        if not tries_left:
            file.close()
            raise UserError(
                f"{folder}: another process is training here; wait for it, or stop it; another run needs another "
                "--job.dump_folder"
            )
        time.sleep(0.1)
    os.utime(file.fileno())
    return file


def join_lock(folder: Path) -> TextIO:
    """Keep the lock while this rank lives: torchrun's ranks do not inherit its launcher's file."""
    file = _create_lock(folder / _LOCKS[1])
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file

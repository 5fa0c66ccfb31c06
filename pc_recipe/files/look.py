"""Asks what is at a path, and tells "nothing" from "could not look".

`Path.exists`, `is_file`, `is_dir` and `glob` report "nothing" on some file-system errors, from Python 3.14 on for
all of them: a run that believes them starts again over its checkpoints. So no other module asks in that way.

The functions raise `ReadFailed` if the file system still refuses after `PAUSES`.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pc.errors import UserError
from pc_recipe.files.errors import ReadFailed

PAUSES = (2.0, 10.0)
"""Seconds before the next try, because an error of a network file system may pass."""

T = TypeVar("T")


def patiently(call: Callable[[], T], path: str | os.PathLike) -> T:
    """What a call that reads `path` returns, called again after `PAUSES` if the file system refuses.

    Raises:
        FileNotFoundError, NotADirectoryError, IsADirectoryError: there is no such thing.
        ReadFailed: every call was refused. This says nothing about what is there: the disk may be gone.
    """
    for pause in (*PAUSES, None):
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as error:
            if pause is None or isinstance(error, PermissionError) or error.errno == errno.ENAMETOOLONG:
                raise ReadFailed(
                    f"{path}: could not be read ({error.strerror or error}); nothing was changed"
                ) from error
            time.sleep(pause)
    raise AssertionError


def is_there(path: str | os.PathLike) -> bool:
    """Whether there is anything at a path; links are followed."""
    return _status(path) is not None


def is_file(path: str | os.PathLike) -> bool:
    return size_of(path) is not None


def size_of(path: str | os.PathLike) -> int | None:
    """A file's size in bytes; None for anything else."""
    status = _status(path)
    return status.st_size if status and stat.S_ISREG(status.st_mode) else None


def is_folder(path: str | os.PathLike) -> bool:
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_link(path: str | os.PathLike) -> bool:
    status = _status(path, follow=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def _status(path: str | os.PathLike, follow: bool = True) -> os.stat_result | None:
    """None where there is nothing, and for a name with NUL, which no file can have."""
    if "\0" in os.fspath(path):
        return None
    try:
        return patiently(lambda: os.stat(path, follow_symlinks=follow), path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _entries(folder: str | os.PathLike) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if there is no folder."""
    try:
        return patiently(lambda: list(os.scandir(os.fspath(folder))), folder)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise UserError(f"{folder} should be a folder") from None


def names(folder: str | os.PathLike) -> list[str]:
    """The sorted names of a folder's entries; none if there is no folder."""
    return sorted(entry.name for entry in _entries(folder))


def everything_in(folder: str | os.PathLike) -> Iterator[os.DirEntry[str]]:
    """All entries of a folder and its subfolders; none if there is no folder."""
    for entry in _entries(folder):
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from everything_in(entry.path)


def refuse(error: OSError) -> None:
    """`onerror` of `os.walk`, which would skip a folder that it cannot list."""
    raise ReadFailed(f"{error.filename}: could not be read ({error.strerror})") from error


def files_below(folder: str | os.PathLike) -> list[Path]:
    """All files in a folder and its subfolders, sorted; none if there is no folder."""
    return sorted(Path(entry) for entry in everything_in(folder) if is_file(entry))


def read(file: str | os.PathLike) -> bytes | None:
    """A file's bytes; None if there is nothing.

    Raises:
        UserError: it is a folder, or a pipe, whose end would never come.
    """
    if not is_file(file):
        if is_there(file):
            raise UserError(f"{file} should be a file")
        return None
    try:
        return patiently(Path(file).read_bytes, file)
    except (FileNotFoundError, NotADirectoryError):
        return None

"""Checks that links and file names in a folder stay inside it, so that nothing outside is changed or read."""

import os
from pathlib import Path

from pc.errors import UserError
from pc_recipe.files import look
from pc_recipe.files.places import CONFIG, checkpoints_of


def require_plain(folder: Path) -> None:
    """Raise a `UserError` if something in `folder`, at any depth, is a link that leads out of it, a pipe or a device.

    Writing to a link changes its target, and reading from a pipe never ends. `checkpoint` may be a link to a larger disk,
    but not into another run; in its target, only checkpoints change.
    """
    disk = checkpoints_of(folder)
    for place in (folder, disk) if look.is_link(disk) else (folder,):
        for entry in look.everything_in(place):
            if entry.is_symlink():
                if Path(entry) != disk and not _leads_into(place, Path(entry)):
                    raise UserError(f"{entry.path} is a link that leads out of {folder}; move it away")
            elif not (entry.is_file() or entry.is_dir()):
                raise UserError(f"{entry.path} is a pipe or a device, not a file; move it away")
    if look.is_link(disk) and look.is_file(disk.resolve().parent / CONFIG):
        raise UserError(f"{disk} is a link to the checkpoints of another run, {disk.resolve().parent}; move it away")


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that raises an `OSError` for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def inside(folder: Path, name: str) -> Path:
    """The path of a file that one of the files in `folder` names.

    Raises:
        UserError: it is outside: by an absolute path, `..` or a link.
    """
    if "\0" in name or not _leads_into(folder, folder / name):
        raise UserError(f"{folder} names {name!r}, which is a file outside of it")
    return folder / name


def _leads_into(folder: Path, path: Path) -> bool:
    """Files in `blobs` count too: in Hugging Face's cache, the files of `snapshots/REVISION` are links to them."""
    whole = Path(os.path.realpath(folder))
    blobs = [place.parent / "blobs" for place in whole.parents if place.name == "snapshots"]
    return any(map(Path(os.path.realpath(path)).is_relative_to, [whole, *blobs]))

"""What lies in a folder leads nowhere else: nothing outside is changed by a link, or read by a name, that came with it."""

import os
from pathlib import Path

from pc.errors import UserError
from pc_recipe.files import look


def require_plain(folder: Path) -> None:
    """Raise a `UserError` if something else than a file or a folder is where a command writes.

    That is in `folder` or in a folder in it. A link would change what it leads to, a pipe never ends. `checkpoint` may be a
    link, to a larger disk; of what it leads to, only checkpoints change.
    """
    entries = [folder / name for name in look.names(folder)]
    below = [place / name for place in entries if look.is_folder(place) for name in look.names(place)]
    for entry in [*entries, *below]:
        if look.is_link(entry) and entry != folder / "checkpoint":
            raise UserError(f"{entry} is a link, and what is written there stays in {folder}; move it away")
        if look.is_there(entry) and not (look.is_file(entry) or look.is_folder(entry)):
            raise UserError(f"{entry} is a pipe or a device, no file; move it away")


def no_link(path: str, flags: int) -> int:
    """An opener for `open`, to which a link is an `OSError`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def inside(folder: Path, name: str) -> Path:
    """The path of a file that something in `folder` names.

    Hugging Face's cache keeps the files of `snapshots/REVISION` as links to `blobs`, where they belong to the folder too.

    Raises:
        UserError: it is outside, by an absolute path, by `..` or by a link.
    """
    path, whole = folder / name, Path(os.path.realpath(folder))
    blobs = [place.parent / "blobs" for place in whole.parents if place.name == "snapshots"]
    if "\0" in name or not any(map(Path(os.path.realpath(path)).is_relative_to, [whole, *blobs])):
        raise UserError(f"{folder} names {name!r}, which is a file outside of it")
    return path

"""File writes that are whole or absent, and checksums."""

import hashlib
import os
import tempfile
from pathlib import Path


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` so that readers see the old file or the new one, never a part.

    The temporary file lies in the same folder, since a rename is atomic only within a file system.
    Missing parent folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_current_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_readable(folder: str | Path) -> None:
    """Give a folder and all in it the permissions that new files get here; some libraries keep theirs to the owner."""
    mask = _current_umask()
    for path in [Path(folder), *Path(folder).rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def sha256_of(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _current_umask() -> int:
    # mkstemp makes files that only their owner can read; there is no way to ask for the umask
    # but to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask

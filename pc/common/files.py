"""Atomic file writes, permissions and checksums."""

import hashlib
import os
import tempfile
from pathlib import Path

from pc.common.errors import WriteFailed


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` so that readers see the old file or the new one, never a part. Creates missing parent folders.

    The temporary file is in the same folder, because a rename is atomic only within a file system.

    Raises:
        WriteFailed: the file system refuses: a full disk, no permission, a file where a folder should be.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_current_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise WriteFailed(f"could not write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def make_readable(folder: str | Path) -> None:
    """Give a folder and its contents default permissions; some libraries create files that only the owner can read."""
    mask = _current_umask()
    for path in [Path(folder), *Path(folder).rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def sha256_of(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _current_umask() -> int:
    # The only way to read the umask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask

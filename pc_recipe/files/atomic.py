"""Atomic file writes and checksums."""

import contextlib
import errno
import hashlib
import os
import secrets
from pathlib import Path

from pc_recipe.files.errors import WriteFailed


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` so that readers see the old file or the new one, never a part. Creates missing parent folders.

    The temporary file is in the same folder, because a rename is atomic only within a file system.

    Raises:
        WriteFailed: the file system refuses: a full disk, no permission, a file where a folder should be.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise WriteFailed(f"could not write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last even if the machine then loses power.

    Raises:
        OSError: the file system refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(descriptor)


def sha256_of(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

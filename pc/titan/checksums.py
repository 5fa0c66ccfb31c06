"""Checksums of a checkpoint's files: computed while writing, verified before loading.

A checkpoint folder gets one more file, `XXH128SUMS`, in the format of the command `xxh128sum`, with a line for each
file, including the index `.metadata`. It is written before `.metadata`, whose presence marks a complete checkpoint and
which records that there are checksums. XXH3 detects damage at memory speed; it does not protect against forgery.
"""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pc.common.files import write_atomically
from pc.common.run_folder import INDEX
from pc.errors import UserError

CHECKSUMS = "XXH128SUMS"


class Damaged(UserError):
    """A checkpoint file is missing or differs from what was written."""


class ChecksummedWriter(FileSystemWriter):
    """Torch's checkpoint writer plus `XXH128SUMS`. Each rank hashes the files that it writes."""

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self.fs = _HashingFileSystem()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:  # the folder is incomplete as soon as the first file is overwritten
            Path(self.path, INDEX).unlink(missing_ok=True)

    def write_data(self, *args: Any, **kwargs: Any) -> Future[list[WriteResult]]:
        # Send the checksums to the coordinator as extra write results, which `finish` removes again.
        written = super().write_data(*args, **kwargs).wait()
        sums = [WriteResult(MetadataIndex(name), 0, digest) for name, digest in self.fs.sums.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(written + sums)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = [result for of_rank in results for result in of_rank]
        self.fs.sums = {r.index.fqn: r.storage_data for r in everything if isinstance(r.storage_data, str)}
        super().finish(metadata, [[r for r in everything if not isinstance(r.storage_data, str)]])

    def storage_meta(self) -> StorageMeta:
        meta = super().storage_meta()
        meta.modules = [CHECKSUMS]
        return meta


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, str] = {}
        """{file name: hexadecimal checksum}"""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[FileIO, None, None]:
        with _HashedFile(path, mode) as stream:
            yield stream
        self.sums[Path(path).name] = stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        # The writer's only rename gives the index its final name, at the very end. Write the checksums before it.
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
        lines = [f"{digest}  {name}\n" for name, digest in sorted(self.sums.items())]
        write_atomically(Path(new_path).with_name(CHECKSUMS), "".join(lines))
        super().rename(path, new_path)


class _HashedFile(FileIO):
    """Unbuffered, so that torch's fsync covers everything written."""

    def __init__(self, path: str | os.PathLike, mode: str) -> None:
        super().__init__(path, mode)
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        done = 0
        while done < len(view):  # one call writes at most 2 GiB
            done += super().write(view[done:])
        return done


def verify(folder: Path, names: Sequence[str]) -> bool:
    """Compare files of a checkpoint with their checksums; False if there is no file of checksums.

    Raises:
        Damaged: a file differs from what was written, or is missing.
    """
    try:
        lines = (folder / CHECKSUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise Damaged(f"{folder / CHECKSUMS}: {error.strerror}") from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if "" in sums:  # a line without a name
        raise Damaged(f"{folder / CHECKSUMS}: damaged, not a list of checksums")
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda name: _compare(folder / name, sums.get(name)), names))
    return True


def _compare(path: Path, expected: str | None) -> None:
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(2**22):
                digest.update(chunk)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    if digest.hexdigest() != expected:
        raise Damaged(f"{path}: damaged, its checksum differs from the one in {CHECKSUMS}")

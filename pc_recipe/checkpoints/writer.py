"""Writes a checkpoint's folder with checksums (`pc_recipe.checkpoints.folder` reads it).

A folder of torch.distributed.checkpoint holds `*.distcp` files with the tensors, from any number of ranks, and a pickled
index, `.metadata`, which is written last. Here it gets one more file, `XXH128SUMS`, in the format of the command
`xxh128sum`, with a line for each other file; the index records that there is one. XXH3 detects damage at memory speed;
it does not protect against forgery.
"""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pc_recipe.files.atomic import sync_folder, write_atomically
from pc_recipe.files.inside import no_link
from pc_recipe.files.run_folder import CHECKSUMS, INDEX


class ChecksummedWriter(FileSystemWriter):
    """Torch's checkpoint writer plus `XXH128SUMS`. Each rank hashes the files that it writes, while it writes them."""

    fs: "_HashingFileSystem"

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        self.fs = _HashingFileSystem()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:  # the folder is incomplete as soon as the first file is overwritten
            for name in (INDEX, CHECKSUMS):
                Path(self.path, name).unlink(missing_ok=True)

    def write_data(self, *args: Any, **kwargs: Any) -> Future[list[WriteResult]]:
        # Each rank knows only the checksums of its own files, and one file must list all. Write results are what torch
        # gathers on the coordinator anyway, so checksums travel as extra ones, which `finish` removes again.
        written = super().write_data(*args, **kwargs).wait()
        sums = [WriteResult(MetadataIndex(name), 0, digest) for name, digest in self.fs.sums.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(written + sums)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        all_results = [result for of_one_rank in results for result in of_one_rank]
        self.fs.sums = {r.index.fqn: r.storage_data for r in all_results if isinstance(r.storage_data, str)}
        super().finish(metadata, [[r for r in all_results if not isinstance(r.storage_data, str)]])

    def storage_meta(self) -> StorageMeta:
        meta = super().storage_meta()
        assert meta is not None
        meta.modules = [CHECKSUMS]
        return meta


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, str] = {}
        """{file name: hexadecimal checksum}."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.FileIO, None, None]:
        with _HashedFile(path, mode) as stream:
            try:
                yield stream
            except RuntimeError as error:
                # torch's archive fails again when it closes; the context is the reason
                raise error.__context__ or error
        self.sums[Path(path).name] = stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        # The writer's only rename gives the index its final name, at the very end. Write the checksums before it.
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
        lines = [f"{digest}  {name}\n" for name, digest in sorted(self.sums.items())]
        write_atomically(Path(new_path).with_name(CHECKSUMS), "".join(lines))
        super().rename(path, new_path)
        sync_folder(Path(new_path).parent)


class _HashedFile(io.FileIO):
    """Unbuffered, so that torch's fsync covers everything written."""

    def __init__(self, path: str | os.PathLike, mode: str) -> None:
        super().__init__(path, mode, opener=no_link)
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        written = 0
        while written < len(view):  # one call writes at most 2 GiB
            written += super().write(view[written:])
        return written

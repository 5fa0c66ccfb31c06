"""Reading folders of torch.distributed.checkpoint without executing what is in them.

Such a folder holds a pickled index, `.metadata`, and `*.distcp` files with the tensors. Torch unpickles the
index freely; here only the few classes that an index consists of are allowed, and tensors and values are read
with `weights_only`. Any number of ranks may have written the folder; one process reads it.
"""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as index_types
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from pc.errors import UserError

_ALLOWED = {
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {_StorageInfo.__name__},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # their home from Python 3.13 on
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's index")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> index_types.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
        index.storage_meta = index.storage_meta or index_types.StorageMeta()
        return index


class CheckpointFolder:
    """One complete `torch.distributed.checkpoint` folder, open for reading.

    Raises:
        UserError: there is none at `path`, or a part of it is missing or cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / ".metadata").is_file():
            raise UserError(self._what_is_there_instead())
        try:
            self._index = _Reader(self.path).read_metadata()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise UserError(f"{self.path / '.metadata'}: not the index of a checkpoint ({error})") from None
        ends: dict[str, int] = {}
        for info in self._index.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise UserError(f"{file}: missing; the checkpoint is incomplete")
            if file.stat().st_size < end:
                raise UserError(f"{file}: {file.stat().st_size} bytes where {end} are needed; it was cut short")

    def shapes(self) -> dict[str, torch.Size | None]:
        """Shape of every entry; None for what is not a tensor."""
        entries = self._index.state_dict_metadata.items()
        return {key: getattr(entry, "size", None) for key, entry in entries}

    def read_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU, in the dtype they were saved in."""
        entries = self._index.state_dict_metadata
        tensors = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked
            dcp.load(tensors, storage_reader=_Reader(self.path), no_dist=True)
        return tensors

    def read_value(self, key: str) -> Any:
        """An entry that is no tensor, such as a string."""
        info = self._index.storage_data[index_types.MetadataIndex(key)]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)

    def _what_is_there_instead(self) -> str:
        if not self.path.exists():
            return f"{self.path}: no such checkpoint"
        if any(self.path.glob("*.distcp")):
            return f"{self.path}: half a checkpoint (no .metadata, which is written last); take an earlier step"
        steps = [
            p.parent for p in [*self.path.glob("step-*/.metadata"), *self.path.glob("checkpoint/step-*/.metadata")]
        ]
        if steps:
            newest = max(steps, key=lambda step: int(step.name.partition("-")[2]))
            return f"{self.path}: not a checkpoint itself; the newest one in it is {newest}"
        return f"{self.path}: not a checkpoint (no .metadata in it)"

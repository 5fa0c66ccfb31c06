"""Reads torch.distributed.checkpoint folders without executing code from them.

Such a folder holds a pickled index, `.metadata`, and `*.distcp` files with the tensors. Torch unpickles the
index without restrictions. This module allows only the few classes that an index needs, and reads tensors and values
with `weights_only`. Any number of ranks may have written the folder.
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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torchtitan.tools.logging import logger

from pc.common.run_folder import INDEX, checkpoints
from pc.errors import UserError
from pc.titan.checksums import CHECKSUMS, Damaged, verify

_ALLOWED = {
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {_StorageInfo.__name__},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},  # where Python 3.13 and later define them
}  # fmt: skip


def _member(enum: type, name: str) -> Any:
    """In place of `getattr`, by which Python 3.11.0 to 3.11.3 pickle the member of an enum."""
    if enum is not index_types._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"getattr of {enum!r} does not belong in a checkpoint's index")
    return enum[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's index")
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Torch's reader with the restricted unpickler, for any number of ranks."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> index_types.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
        index.storage_meta = index.storage_meta or index_types.StorageMeta()
        return index


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, which also reads values other than tensors with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        # Torch's planner unpickles without restrictions, so give it only what was read safely here.
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class CheckpointFolder:
    """One complete `torch.distributed.checkpoint` folder, open for reading. The first read verifies its checksums.

    Raises:
        UserError: there is no checkpoint at `path`.
        Damaged: the index differs from what was written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._verified = False
        if not (self.path / INDEX).is_file():
            raise UserError(self._what_is_there_instead())
        has_checksums = verify(self.path, [INDEX])
        try:
            self._index = Reader(self.path).read_metadata()
            self._files = sorted({info.relative_path for info in self._index.storage_data.values()})
        except Exception as error:  # a damaged index can make the unpickler raise anything
            raise Damaged(f"{self.path / INDEX}: not the index of a checkpoint ({error})") from None
        if not has_checksums and CHECKSUMS in (getattr(self._index.storage_meta, "modules", None) or []):
            raise Damaged(f"{self.path / CHECKSUMS}: missing, so the checkpoint cannot be verified")

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Verify every `parts`-th file, starting with number `part`; the other ranks verify the rest.

        Raises:
            Damaged: names a file.
        """
        if not verify(self.path, self._files[part::parts]):
            logger.warning(f"{self.path} has no checksums; its files were not checked")
        self._verified = True

    def shapes(self) -> dict[str, torch.Size | None]:
        """Shape of every entry; None if it is not a tensor."""
        return {key: getattr(entry, "size", None) for key, entry in self._index.state_dict_metadata.items()}

    def read_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        """Full tensors on the CPU, in the dtype they were saved in."""
        if not self._verified:
            self.verify()
        entries = self._index.state_dict_metadata
        tensors = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is intended
            dcp.load(tensors, storage_reader=Reader(self.path), no_dist=True)
        return tensors

    def read_value(self, key: str) -> Any:
        """An entry that is not a tensor, such as a string."""
        if not self._verified:
            self.verify()
        info = self._index.storage_data[index_types.MetadataIndex(key)]
        with open(self.path / info.relative_path, "rb") as file:
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)

    def _what_is_there_instead(self) -> str:
        if not self.path.exists():
            return f"{self.path}: no such checkpoint"
        if any(self.path.glob("*.distcp")):
            return f"{self.path}: incomplete checkpoint (no .metadata, which is written last); use an earlier step"
        found = {**checkpoints(self.path), **checkpoints(self.path / "checkpoint")}
        if complete := [step for step in found if (found[step] / INDEX).exists()]:
            return f"{self.path}: not a checkpoint itself; the newest one in it is {found[max(complete)]}"
        return f"{self.path}: not a checkpoint (no .metadata in it)"

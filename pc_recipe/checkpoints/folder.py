"""Reads a checkpoint's folder (`pc_recipe.checkpoints.writer`) without executing anything in it, and verifies it.

An index is a pickle. This module treats it as data: the pickle can reach no existing object, so it can build an index
and change nothing else. Tensors and values are read with `weights_only`.
"""

import hashlib
import io
import math
import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import metadata as index_types
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future
from torchtitan.tools.logging import logger

from pc.errors import UserError
from pc_recipe.checkpoints.values import STEP, require_valid
from pc_recipe.files import look
from pc_recipe.files.errors import DiskFailed
from pc_recipe.files.inside import inside
from pc_recipe.files.run_folder import CHECKSUMS, INDEX, find_newest_checkpoint, is_complete, step_of, was_complete

UNCHANGED = "complete checkpoints are unchanged, and the same command continues from the newest"


class Damaged(UserError):
    """A checkpoint file is missing, differs from what was written, or holds what no checkpoint holds."""


class CheckpointFolder:
    """One complete checkpoint, open for reading. Its checksums are verified before tensors are read.

    Raises:
        UserError: there is no checkpoint at `path`.
        Damaged: the index differs from what was written.
        ReadFailed: the file system refuses to read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._verified = False
        if not is_complete(self.path):
            if was_complete(self.path):
                raise Damaged(
                    f"{self.path / INDEX}: missing, as after a copy without hidden files; {CHECKSUMS} names it"
                )
            raise UserError(f"{self.path}: {_explain_missing_index(self.path)}")
        # The index comes first, because it names the other files. Its checksum is compared before it is unpickled: a
        # flipped bit could still give a valid index, with another offset of a tensor.
        has_checksums = self._compare_checksums([INDEX])
        try:
            self._reader = Reader(self.path)
            self._index = self._reader.read_metadata()
            self._files = sorted({info.relative_path for info in self._index.storage_data.values()})
            must_have_checksums = CHECKSUMS in (getattr(self._index.storage_meta, "modules", None) or [])
        except UserError:
            raise
        except Exception as error:  # a damaged index can make the unpickler raise anything
            reason = " ".join(str(error).split())
            raise Damaged(f"{self.path / INDEX}: not the index of a checkpoint ({reason})") from None
        # Folders that torch wrote have no checksums and are accepted. One from `writer` says in its index
        # that it has them, so the file of checksums cannot get lost unnoticed.
        if not has_checksums and must_have_checksums:
            raise Damaged(f"{self.path / CHECKSUMS}: missing, so the checkpoint cannot be verified")

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Verify every `parts`-th file, starting with number `part`; the other ranks verify the rest.

        Raises:
            Damaged: names a file.
            ReadFailed: the file system refuses to read.
        """
        if not self._compare_checksums(self._files[part::parts]):
            logger.warning(f"{self.path} has no checksums; its files were not checked")
        self._verified = True

    def shapes(self) -> dict[str, torch.Size | None]:
        """Shape of every entry; None if it is not a tensor."""
        return {key: getattr(entry, "size", None) for key, entry in self._index.state_dict_metadata.items()}

    @property
    def step(self) -> int:
        """The step that it holds; its folder's number if it holds weights alone, -1 if that has none either.

        Raises:
            UserError: its folder has the number of another step. Numbers say which checkpoint is the newest.
        """
        number = step_of(self.path)
        step = self.read_value(STEP) if self.shapes().get(STEP, ()) is None else number
        if number not in (step, -1):
            raise UserError(f"{self.path} holds step {step}: rename it to step-{step}, or delete it")
        return step

    def read_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        """Full tensors on the CPU, in the dtype they were saved in."""
        if not self._verified:
            self.verify()
        _ = self.step
        entries: dict[str, Any] = self._index.state_dict_metadata
        tensors = {key: torch.zeros(entries[key].size, dtype=entries[key].properties.dtype) for key in keys}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is intended
            self.load(tensors, no_dist=True)
        return tensors

    def load(self, state: dict[str, Any], no_dist: bool = False) -> None:
        """Fill the tensors and values of `state`. All ranks call it, unless `no_dist` says that there is one.

        Raises:
            Damaged: a file holds something else than an entry that it should hold. `state` is half filled then.
            UserError: an entry of `state` is not in the checkpoint, or has another shape.
        """
        with plain_errors(self.path):
            dcp.load(state, storage_reader=self._reader, planner=LoadPlanner(self.path), no_dist=no_dist)

    def read_value(self, key: str) -> Any:
        """An entry that is not a tensor, such as a string; only its own file is verified."""
        info = self._index.storage_data[MetadataIndex(key)]
        if not self._verified:
            self._compare_checksums([info.relative_path])
        return _load_value(io.BytesIO(_read_part(self.path / info.relative_path, info)), self.path, key)

    def _compare_checksums(self, names: Sequence[str]) -> bool:
        """Compare files with their checksums, in parallel; False if there is no file of checksums."""
        file = self.path / CHECKSUMS
        content = look.read(file)
        if content is None:
            return False
        lines = content.decode(errors="replace").splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        if "" in sums:  # a line without a name
            raise Damaged(f"{file}: damaged, not a list of checksums")
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            for name, digest in zip(names, pool.map(_hash_file, (self.path / name for name in names)), strict=True):
                if digest != sums.get(name):
                    raise Damaged(f"{self.path / name}: damaged, its checksum differs from the one in {CHECKSUMS}")
        return True


class Reader(FileSystemReader):
    """Torch's reader with the restricted unpickler, for any number of ranks. It retries refused reads, and reads the
    index once.

    Raises:
        Damaged: the index names a file that is not in the checkpoint, or the files lack part of an entry; or an entry is
            not a tensor.
    """

    _read_index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read_index is None:
            self._read_index = self._read_anew()
        return self._read_index

    def _read_anew(self) -> Metadata:
        path = Path(self.path)
        file = path / INDEX
        index = _IndexUnpickler(io.BytesIO(look.patiently(file.read_bytes, file))).load()
        index.storage_meta = index.storage_meta or StorageMeta()
        sizes: dict[str, int] = {}
        for name in {info.relative_path for info in index.storage_data.values()}:
            # reading a device or a pipe would never end
            if Path(name).name != name or (size := look.size_of(inside(path, name))) is None:
                raise Damaged(f"{path / INDEX}: names {name!r}, which is not a file of this checkpoint")
            sizes[name] = size
        _require_whole(index, sizes, path / INDEX)
        return index

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            file = Path(self.path, info.relative_path)
            data = io.BytesIO(look.patiently(partial(_read_part, file, info), file))
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, data)
            else:
                stored = self._load_tensor(data, item.storage_index, file)
                target = planner.resolve_tensor(item).detach()
                part = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(stored[tuple(slice(begin, begin + length) for begin, length in part)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_tensor(self, data: io.BytesIO, index: MetadataIndex, file: Path) -> Tensor:
        """The stored part of a tensor that an entry of the index names."""
        entry: Any = self.read_metadata().state_dict_metadata[index.fqn]
        named = entry.chunks[index.index].sizes, entry.properties.dtype, torch.strided, "cpu"
        try:
            tensor = torch.load(data, map_location="cpu", weights_only=True)
            found: tuple = tensor.size(), tensor.dtype, tensor.layout, tensor.device.type
        except Exception as error:  # torch may raise anything, and would advise loading it without restrictions
            if isinstance(error, MemoryError) or "alloc" in str(error):
                raise DiskFailed(f"{file}: {index.fqn} needs more memory than there is") from None
            found = (type(error).__name__,)
        for one, other in zip(found, named, strict=False):
            if one != other:
                raise Damaged(f"{file}: {index.fqn} is damaged, or not the tensor that {INDEX} names ({one})")
        return tensor


def _read_part(path: Path, part: _StorageInfo) -> bytes:
    with open(path, "rb") as file:
        file.seek(part.offset)
        return file.read(part.length)


def _require_whole(index: Metadata, sizes: dict[str, int], file: Path) -> None:
    """Raise `Damaged` unless the files, of these sizes, hold every entry."""
    stored, used = Counter[str](), Counter[str]()
    for key, info in index.storage_data.items():
        if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
            raise Damaged(f"{file.with_name(info.relative_path)}: damaged, it does not hold {key.fqn!r:.200}")
        stored[key.fqn] += info.length
        used[info.relative_path] += info.length  # bytes under two names would count twice
        if used[info.relative_path] > sizes[info.relative_path]:
            raise Damaged(f"{file.with_name(info.relative_path)}: damaged, it does not hold all that {INDEX} names")
    for name, entry in index.state_dict_metadata.items():
        is_whole = isinstance(name, str) and name.isprintable() and name in stored
        if not isinstance(entry, BytesStorageMetadata):
            elements = math.prod(entry.size)
            is_whole &= elements == sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            is_whole &= elements * entry.properties.dtype.itemsize <= stored[name]
        if not is_whole:
            raise Damaged(f"{file}: {name!r:.200} is incomplete in the files")


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Instead of torch's exception about the ranks, which is no `Exception`, raise one rank's: a `UserError`, or a
    file-system error as one, if there is any."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for _, (cause, _) in sorted(error.failures.items())]
        for rank, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, OSError):
                cause = DiskFailed(f"{path}: {cause.strerror} (rank {rank}); {UNCHANGED}")
            if isinstance(cause, UserError):
                raise cause from error
        raise causes[0] from error


class LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, but it reads values other than tensors with `weights_only`, too.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, own in self.state_dict.items():
            entry: Any = self.metadata.state_dict_metadata.get(name)
            if entry is None:
                raise UserError(f"{self._path}: {name} is missing")
            if isinstance(own, Tensor) == isinstance(entry, BytesStorageMetadata):
                raise Damaged(f"{self._path}: {name} should {'' if isinstance(own, Tensor) else 'not '}be a tensor")
            if isinstance(own, Tensor) and own.size() != entry.size:
                raise UserError(f"{self._path}: {name} has shape {[*entry.size]}, this run needs {[*own.size()]}")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        # Torch's planner unpickles what it is given, so that is only what `weights_only` has read.
        torch.save(_load_value(value, self._path, read_item.dest_index.fqn), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _load_value(data: io.BytesIO, path: Path, name: str) -> Any:
    """An entry that is not a tensor; every one is read here."""
    try:
        value = torch.load(data, weights_only=True)
    except Exception as error:  # torch's message would advise loading it without restrictions
        raise Damaged(f"{path}: {name} is not a plain value ({type(error).__name__})") from None
    try:
        require_valid(name, value)
    except ValueError as error:
        raise Damaged(f"{path}: {error}") from None
    return value


class _StandIn(type):
    """The type of the stand-ins that an index gets for the classes and functions that it names.

    A pickle may call them, and set their attributes. So it gets none of torch's classes, but classes that make their
    instances, and that cannot be changed.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"an index sets {name!r:.80} of {cls.__name__}")


def _stand_in(name: str, make: Callable[..., Any]) -> _StandIn:
    return _StandIn(name, (), {"__slots__": (), "__new__": lambda _, *given: make(*given)})


def _for_instances_of(cls: type) -> _StandIn:
    return _stand_in(cls.__name__, lambda: object.__new__(cls))


class _MemoryFormat(int):
    """Equal to a member of torch's enum; the member itself is shared, and an index could change it."""

    def __eq__(self, member: object) -> bool:
        return int(self) == getattr(member, "value", None)

    __hash__ = int.__hash__


_MEMORY_FORMAT = _stand_in("_MEM_FORMAT_ENCODING", _MemoryFormat)


def _member(enum: type, name: str) -> _MemoryFormat:
    """In place of `getattr`, by which Python 3.11.0 to 3.11.3 pickle the member of an enum."""
    if enum is not _MEMORY_FORMAT:
        raise pickle.UnpicklingError(f"getattr of {enum!r} does not belong in a checkpoint's index")
    return _MemoryFormat(index_types._MEM_FORMAT_ENCODING[name].value)


_DATACLASSES = (
    Metadata, MetadataIndex, StorageMeta, index_types.TensorStorageMetadata, BytesStorageMetadata,
    index_types.TensorProperties, index_types.ChunkStorageMetadata, _StorageInfo,
)  # fmt: skip
_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(cls.__module__, cls.__name__): _for_instances_of(cls) for cls in _DATACLASSES},
    # Python 3.13 pickles paths under the second name
    **{
        (module, name): _stand_in(name, Path)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath")
    },
    (index_types.__name__, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("torch", "Size"): _stand_in("Size", torch.Size),
    ("torch.serialization", "_get_layout"): _stand_in("_get_layout", torch.serialization._get_layout),
    ("builtins", "getattr"): _stand_in("getattr", _member),
}
"""{(module, name): what an index gets for it}. A dtype has no attributes that could be set."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's index")
        return _NAMES[module, name]


def _hash_file(path: Path) -> str:
    def digest() -> str:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()

    # Two errors with different consequences. A damaged checkpoint moves aside, and the run continues from an earlier one.
    # After a refused read nothing may be concluded, least of all that hours of training are lost, so the run stops.
    try:
        return look.patiently(digest, path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise Damaged(f"{path}: {error.strerror}") from None


def _explain_missing_index(path: Path) -> str:
    """A line about a path that holds no index, and what to use instead."""
    if look.is_folder(path) and any(name.endswith(".distcp") for name in look.names(path)):
        return "incomplete checkpoint (no .metadata, which is written last); use an earlier step"
    if look.is_file(path / "config.json"):
        return "a Hugging Face folder, not a checkpoint; a run starts from it with checkpoint.initial_load_in_hf = true"
    # of a run, or of its folder of checkpoints
    newest = find_newest_checkpoint(path) or find_newest_checkpoint(path.parent)
    if newest and newest.is_relative_to(path):
        return f"not a checkpoint itself; the newest one in it is {newest}"
    return "not a checkpoint (no .metadata in it)" if look.is_there(path) else "no such checkpoint"

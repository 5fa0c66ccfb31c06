"""Token shards on disk: atomic writes, checks, and memory-mapped reads.

A shard is a NumPy file `NNNNN.tokens.npy`, uint16 or uint32 [tokens]: documents one after another, each ending with the
only EOS in it.
"""

import hashlib
import io
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from pc.common.files import sha256_of, write_atomically
from pc.data.manifest import Manifest, Shard
from pc.errors import UserError


def write_shard(folder: Path, split: str, number: int, tokens: np.ndarray, documents: int) -> Shard:
    """Write tokens [total] of so many documents. The file is renamed into place when complete."""
    name = f"{split}/{number:05d}.tokens.npy"
    path, buffer = folder / name, io.BytesIO()
    np.save(buffer, tokens.astype(tokens.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
    content = buffer.getvalue()
    for leftover in path.parent.glob(f".{path.name}.*"):  # of a process that was killed while writing
        leftover.unlink(missing_ok=True)
    write_atomically(path, content)
    return Shard(name, len(tokens), documents, len(content), hashlib.sha256(content).hexdigest())


def require_file(folder: Path, shard: Shard, *, checksum: bool = False) -> None:
    """Raise a `UserError` if the shard's file is missing, or has another size or checksum than the manifest says."""
    path = folder / shard.tokens_file
    size = path.stat().st_size if path.is_file() else "no"
    said = f"{path} has {size} bytes instead of {shard.tokens_bytes}" if size != shard.tokens_bytes else ""
    if checksum and not said and sha256_of(path) != shard.tokens_sha256:
        said = f"{path} does not have the checksum of the manifest"
    if said:
        raise UserError(f"{said}; delete it and repeat the tokenising command to recreate it")


def verify(manifest: Manifest) -> None:
    """Verify all checksums; reads every byte."""
    for shards in manifest.shards.values():
        for shard in shards:
            require_file(manifest.folder, shard, checksum=True)


def open_tokens(folder: Path, shard: Shard) -> np.ndarray:
    """The shard's tokens, memory-mapped [tokens]."""
    tokens = np.load(folder / shard.tokens_file, mmap_mode="r", allow_pickle=False)
    return np.asarray(tokens)  # a plain view: slicing np.memmap is slow


class TokenStream:
    """All tokens of one split as a single long array; opens shards when needed.

    Checks all file sizes at the start, and on every read that all ids are below `vocab_size`.
    """

    def __init__(self, manifest: Manifest, split: str):
        self.folder = manifest.folder
        self.vocab_size = manifest.vocab_size
        self.shards = manifest.shards[split]
        self.ends = list(accumulate(shard.tokens for shard in self.shards))  # [shards]
        self._opened: dict[int, np.ndarray] = {}
        for shard in self.shards:
            require_file(self.folder, shard)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_opened": {}}  # worker processes map the files themselves

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop - 1, possibly from several shards [stop - start]."""
        pieces = list(self._pieces(start, stop))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        number = bisect_right(self.ends, start)
        while start < stop:
            if number not in self._opened:
                self._opened[number] = open_tokens(self.folder, self.shards[number])
            end = self.ends[number]
            first = end - self.shards[number].tokens
            piece = self._opened[number][start - first : min(stop, end) - first]
            if int(piece.max()) >= self.vocab_size:
                path = self.folder / self.shards[number].tokens_file
                raise UserError(
                    f"{path} holds token {int(piece.max())}, but its tokenizer has {self.vocab_size}: "
                    "the file is damaged; delete it and repeat the tokenising command"
                )
            yield piece
            start, number = end, number + 1

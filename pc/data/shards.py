"""Token shards on disk: atomic writes, checks, and memory-mapped reads.

A shard is two NumPy files:
`NNNNN.tokens.npy`   uint16 or uint32 [tokens], all documents concatenated, including BOS and EOS
`NNNNN.offsets.npy`  int64 [documents + 1], the start of each document; the last entry is the end
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


def write_shard(folder: Path, split: str, number: int, tokens: np.ndarray, lengths: np.ndarray) -> Shard:
    """Write tokens [total] and the offsets of documents of these lengths [documents].

    Each file is renamed into place when complete, then read back to verify its checksum.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    assert offsets[-1] == len(tokens), (offsets[-1], len(tokens))
    names = [f"{split}/{number:05d}.{part}.npy" for part in ("tokens", "offsets")]
    written = [_write_array(folder / name, array) for name, array in zip(names, (tokens, offsets), strict=True)]
    (tokens_bytes, tokens_sha256), (offsets_bytes, offsets_sha256) = written
    return Shard(*names, len(tokens), len(lengths), tokens_bytes, offsets_bytes, tokens_sha256, offsets_sha256)


def _write_array(path: Path, array: np.ndarray) -> tuple[int, str]:
    buffer = io.BytesIO()
    np.save(buffer, array.astype(array.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
    content = buffer.getvalue()
    expected = hashlib.sha256(content).hexdigest()
    for leftover in path.parent.glob(f".{path.name}.*"):  # of a process that was killed while writing
        leftover.unlink(missing_ok=True)
    write_atomically(path, content)
    if sha256_of(path) != expected:
        raise UserError(f"{path} reads back differently from what was written: the disk is faulty")
    return len(content), expected


def size_complaint(folder: Path, shard: Shard) -> str | None:
    """An error if a file of the shard is missing or has the wrong size, else None."""
    for name, size in ((shard.tokens_file, shard.tokens_bytes), (shard.offsets_file, shard.offsets_bytes)):
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes instead of {size}"
    return None


def checksum_complaint(folder: Path, shard: Shard) -> str | None:
    """Like `size_complaint`, but reads every byte: verifies checksums, and offsets against the tokens."""
    if complaint := size_complaint(folder, shard):
        return complaint
    for name, digest in ((shard.tokens_file, shard.tokens_sha256), (shard.offsets_file, shard.offsets_sha256)):
        if sha256_of(folder / name) != digest:
            return f"{folder / name} does not have the checksum of the manifest"
    try:
        read_offsets(folder, shard)
    except UserError as error:
        return str(error)
    return None


def open_tokens(folder: Path, shard: Shard, dtype: str) -> np.ndarray:
    """The shard's tokens, memory-mapped [tokens]."""
    path = folder / shard.tokens_file
    tokens = _open_array(path)
    if tokens.dtype != np.dtype(dtype).newbyteorder("<") or tokens.shape != (shard.tokens,):
        raise UserError(
            f"{path} holds {tokens.dtype} {list(tokens.shape)} where the manifest says {dtype} [{shard.tokens}]"
        )
    return tokens


def read_offsets(folder: Path, shard: Shard) -> np.ndarray:
    """Document offsets int64 [documents + 1], checked against the number of tokens."""
    path = folder / shard.offsets_file
    offsets = np.asarray(_open_array(path))
    if offsets.dtype != np.int64 or offsets.shape != (shard.documents + 1,):
        raise UserError(
            f"{path} holds {offsets.dtype} {list(offsets.shape)} where the manifest says int64 [{shard.documents + 1}]"
        )
    if offsets[0] != 0 or offsets[-1] != shard.tokens or np.any(np.diff(offsets) <= 0):
        raise UserError(f"{path} does not fit {shard.tokens_file}: its offsets do not cover the tokens in order")
    return offsets


def _open_array(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{path} is missing or damaged ({error}); delete it and repeat the tokenising command"
        ) from error


class TokenStream:
    """All tokens of one split as a single long array; opens shards when needed.

    Checks all file sizes at the start, and on every read that all ids are below `vocab_size`.
    """

    def __init__(self, manifest: Manifest, split: str):
        self.folder = manifest.folder
        self.dtype = manifest.dtype
        self.vocab_size = manifest.vocab_size
        self.shards = manifest.shards[split]
        self.ends = list(accumulate(shard.tokens for shard in self.shards))  # [shards]
        self._opened: dict[int, np.ndarray] = {}
        for shard in self.shards:
            if complaint := size_complaint(self.folder, shard):
                raise UserError(f"{complaint}; delete it and repeat the tokenising command to recreate it")

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
                mapped = open_tokens(self.folder, self.shards[number], self.dtype)
                self._opened[number] = np.asarray(mapped)  # a plain view: slicing np.memmap is slow
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

"""Token shards on disk: atomic writes, and reads that leave no file open.

A shard is a NumPy file `NNNNN.tokens.npy`, uint16 or uint32 [tokens]: documents one after another, each ending with the
only EOS in it. It is right if its size and checksum are those of the manifest. The start of a run compares all
sizes, and `scripts/inspect_data.py` all checksums. If tokens look implausible when they are read, their shard's
checksum is compared at once.
"""

import hashlib
import io
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from pc.errors import UserError
from pc_recipe.data.manifest import Manifest, TokenShard
from pc_recipe.files import look
from pc_recipe.files.atomic import sha256_of, write_atomically
from pc_recipe.files.inside import inside

READERS = 16  # a shared file system answers slowly, but many at once


def write_shard(folder: Path, split: str, name: str, tokens: np.ndarray, documents: int) -> TokenShard:
    """Write tokens [total] of this many documents. The file is renamed into place when complete."""
    file = f"{split}/{name}.tokens.npy"
    path, buffer = folder / file, io.BytesIO()
    np.save(buffer, tokens, allow_pickle=False)
    content = buffer.getvalue()
    write_atomically(path, content)
    return TokenShard(file, len(tokens), documents, len(content), hashlib.sha256(content).hexdigest())


def remove_leftovers(shards: Path) -> None:
    """Remove temporary files of killed processes. One younger than an hour may still be being written."""
    for file in (shards / name for name in look.names(shards) if name.startswith(".")):
        with suppress(FileNotFoundError):  # renamed meanwhile
            if time.time() - file.stat().st_mtime > 3600:
                file.unlink()


def read_tokens(manifest: Manifest, shard: TokenShard, first: int = 0, count: int | None = None) -> np.ndarray:
    """Tokens `first` … `first + count - 1` of a shard, by default all [count].

    The file is open only during the read: 160 B tokens are 2,700 files, more than a process may usually hold open or mapped.

    Raises:
        UserError: names a file that is gone, ends too early or is not as it was written.
        ReadFailed: the file system refuses to read it.
    """
    path, dtype = _path_of(manifest.folder, shard.tokens_file), np.dtype(manifest.dtype)
    count = shard.tokens - first if count is None else count
    begin = shard.tokens_bytes - (shard.tokens - first) * dtype.itemsize  # NumPy's header comes first
    try:
        tokens = look.patiently(lambda: np.fromfile(path, dtype, count, offset=begin), path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(tokens) < count:
        raise UserError(f"{path} ends before its {shard.tokens:,} tokens; repeat the tokenising command to recreate it")
    entries = manifest.tokenizer.vocab_size
    if not _is_plausible(tokens, entries):
        require_file(manifest.folder, shard, checksum=True)
        if tokens.max() >= entries:
            raise UserError(
                f"{path} was written with token {tokens.max()}, but its tokenizer has {entries} entries; delete the "
                "folder and tokenise again"
            )
    return tokens


_path_of = cache(inside)
"""Checks where a path leads once, not at each read."""


def require_file(folder: Path, shard: TokenShard, *, checksum: bool = False) -> None:
    """Raise a `UserError` if the shard's file is missing, or has another size or checksum than the manifest says."""
    path = inside(folder, shard.tokens_file)
    size = look.size_of(path)
    problem = f"{path} has {size or 'no'} bytes instead of {shard.tokens_bytes}" if size != shard.tokens_bytes else ""
    if checksum and not problem and look.patiently(lambda: sha256_of(path), path) != shard.tokens_sha256:
        problem = f"{path} does not have the checksum of the manifest"
    if problem:
        raise UserError(f"{problem}; delete it and repeat the tokenising command to recreate it")


def require_files(folder: Path, shards: Sequence[TokenShard], advance: Callable[[int], object] | None = None) -> None:
    """`require_file` for all shards of a folder. With `advance`, called with each file's size, it compares checksums too."""
    checksum = advance is not None
    with ThreadPoolExecutor(READERS) as pool:
        checks = pool.map(lambda shard: require_file(folder, shard, checksum=checksum), shards)
        for shard, _ in zip(shards, checks, strict=True):
            if advance:
                advance(shard.tokens_bytes)


def _is_plausible(tokens: np.ndarray, vocab_size: int) -> bool:
    """Whether tokens [count] are all in the vocabulary and not all equal, which may be text, or a hole in the file."""
    return bool(tokens.max() < vocab_size and (len(tokens) < 2 or np.any(tokens != tokens[0])))


class TokenStream:
    """All tokens of one split as a single long array."""

    def __init__(self, manifest: Manifest, split: str):
        self.manifest = manifest
        self.shards = manifest.shards[split]
        self.ends = list(accumulate(shard.tokens for shard in self.shards))  # [shards]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop - 1, possibly from several shards [stop - start]."""
        number, pieces = bisect_right(self.ends, start), []
        while start < stop:
            shard, end = self.shards[number], self.ends[number]
            pieces.append(read_tokens(self.manifest, shard, start - (end - shard.tokens), min(stop, end) - start))
            start, number = end, number + 1
        return np.concatenate(pieces)

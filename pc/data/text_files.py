"""JSON lines and text files, plain or compressed (.gz, .zst), read in the same units of work as parquet files.

A JSON lines file has one document per line. Its groups correspond to parquet's row groups: group i contains the lines
that begin in the i-th BLOCK of uncompressed bytes. A text file is one document.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from pc.errors import UserError

BLOCK = 16 * 10**6
"""Uncompressed bytes per group of lines. It determines the units of work."""

PARQUET, JSON_LINES, TEXT = "parquet", "JSON lines", "text"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_KINDS = {".parquet": PARQUET, ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".txt": TEXT}


def kind_of(file: str) -> str | None:
    """The kind of a file by its name; None if unknown."""
    name = file.removesuffix(_compressed_suffix(file))
    kind = next((kind for suffix, kind in _KINDS.items() if name.endswith(suffix)), None)
    return None if kind == PARQUET and name != file else kind


def _compressed_suffix(file: str) -> str:
    return next((suffix for suffix in _COMPRESSIONS if file.endswith(suffix)), "")


@contextmanager
def open_bytes(file: str) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a local path or an hf:// address."""
    try:
        if "://" in file:
            import fsspec

            raw = fsspec.open(file, "rb").open()
        else:
            raw = open(file, "rb")
        with raw:
            suffix = _compressed_suffix(file)
            if not suffix:
                yield raw
                return
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), _COMPRESSIONS[suffix]) as stream:
                yield io.BufferedReader(stream, 2**20)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def groups_of(file: str, text_column: str) -> tuple[tuple[int, int], ...]:
    """(documents, bytes) of each group; reads the whole file, which does not record its length.

    Raises:
        UserError: the first line is not a JSON object with `text_column`, or the file cannot be read.
    """
    if kind_of(file) == TEXT:
        with open_bytes(file) as stream:
            return ((1, sum(len(part) for part in iter(lambda: stream.read(2**20), b""))),)
    groups: list[list[int]] = []
    with open_bytes(file) as stream:
        position = 0
        for line in stream:
            if line.strip() and not any(rows for rows, _ in groups):
                _text_of(line, text_column, file, position)
            while len(groups) <= position // BLOCK:
                groups.append([0, 0])
            groups[-1][0] += bool(line.strip())
            groups[-1][1] += len(line)
            position += len(line)
    return tuple((rows, size) for rows, size in groups)


def texts_of(file: str, text_column: str, first: int, end: int) -> Iterator[bytes]:
    """UTF-8 texts of the groups first … end - 1; null becomes an empty text, and empty lines are skipped."""
    with open_bytes(file) as stream:
        if kind_of(file) == TEXT:
            yield stream.read()
            return
        position = _skip(stream, first * BLOCK, not _compressed_suffix(file))
        for line in stream:
            if position >= end * BLOCK:
                return
            if line.strip():
                yield _text_of(line, text_column, file, position)
            position += len(line)


def _skip(stream: BinaryIO, start: int, can_seek: bool) -> int:
    """Move to the first line that begins at or after `start`; returns its position."""
    if start == 0:
        return 0
    position = start - 1  # finds a line that begins exactly at `start`, because the previous one ends here
    if can_seek:
        stream.seek(position)
    else:
        left = position
        while left:
            left -= len(stream.read(min(left, 2**20))) or left
    return position + len(stream.readline())


def _text_of(line: bytes, text_column: str, file: str, position: int) -> bytes:
    where = f"{file}, line at byte {position}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); each line should be an object with {text_column!r}") from None
    if not isinstance(row, dict) or text_column not in row:
        has = f"it has {', '.join(row)}" if isinstance(row, dict) else f"it is a {type(row).__name__}"
        raise UserError(f"{where}: no {text_column!r}; {has} (--text-column)")
    text = row[text_column]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: {text_column!r} is a {type(text).__name__}, not text")
    return (text or "").encode("utf-8", "surrogatepass")

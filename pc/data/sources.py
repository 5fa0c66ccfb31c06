"""Reads text from parquet and JSON lines files, on this machine or on the Hub, divided into units of work."""

import glob
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pc.errors import UserError

PARQUET, JSON_LINES = (".parquet",), (".jsonl", ".json")
HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+")
BLOCK = 16 * 10**6
"""Bytes of a part of a JSON lines file. It determines the units of work."""


@dataclass(frozen=True)
class SourceFile:
    """One file: path or hf:// address, bytes, and the bytes of text in each part.

    A part is a row group of parquet (bytes uncompressed), or the lines that begin in one BLOCK of a JSON lines file.
    """

    file: str
    size: int
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Parts `first` to `end` - 1 of one file, which become one shard per split."""

    number: int
    file: str
    first: int
    end: int
    text_bytes: int


def find_files(source: str, subset: str | None = None) -> list[str]:
    """The files of `source`: a file, a folder, a glob pattern or a Hub dataset `owner/name`."""
    files = None if subset else find_local_files(source)
    if files is None:
        files = find_hub_files(source, subset) if HUB_DATASET.fullmatch(source) else []
    wrong = [file for file in files if not file.endswith(PARQUET + JSON_LINES)]
    if wrong or not files:
        raise UserError(
            f"--input {(wrong or [source])[0]}: no .parquet or .jsonl file, folder or glob pattern of such, or Hub "
            "dataset owner/name (docs/data.md shows how to convert)"
        )
    return files


def find_local_files(source: str) -> list[str] | None:
    """The files of `source` on this machine, sorted; None if it is neither a file, a folder nor a glob pattern."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.name.endswith(PARQUET + JSON_LINES))
    if path.is_file():
        return [str(path)]
    if any(sign in source for sign in "*?["):
        return sorted(glob.glob(str(path), recursive=True))
    return None


def find_hub_files(dataset: str, subset: str | None) -> list[str]:
    """hf:// addresses of the dataset's files, pinned to the current revision on the Hub."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset, subset)
    except Exception as error:  # unknown dataset or subset, no network, no access: the message explains it
        raise UserError(f"Hub dataset {dataset!r}, subset {subset!r}: {error}") from error
    return [str(file) for file in builder.config.data_files["train"]]


def measure(files: list[str], text_column: str) -> list[SourceFile]:
    """The files' sizes and parts; reads parquet footers only, and checks that there is a column of text."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda file: _measure(file, text_column), files))


def _measure(file: str, text_column: str) -> SourceFile:
    size = size_of(file)
    if file.endswith(JSON_LINES):
        next(read_texts(Unit(0, file, 0, 1, size), text_column), None)
        return SourceFile(file, size, tuple(min(BLOCK, size - start) for start in range(0, size, BLOCK)))
    with open_parquet(file) as parquet:
        schema = parquet.schema_arrow
        kind = schema.field(text_column).type if text_column in schema.names else None
        if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
            raise UserError(
                f"{file}: column {text_column!r} should hold text; columns are {', '.join(schema.names)} (--text-column)"
            )
        metadata = parquet.metadata
        column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_column)
        groups = [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]
        return SourceFile(file, size, tuple(group.total_uncompressed_size for group in groups))


def size_of(file: str) -> int:
    """Bytes of a local path or an hf:// address."""
    file_system, path = fsspec.url_to_fs(file)
    return file_system.size(path)


def _open(file: str) -> BinaryIO:
    return fsspec.open(file, "rb").open()


def open_parquet(file: str) -> pq.ParquetFile:
    """Open a local path or an hf:// address."""
    with _readable(file):
        return pq.ParquetFile(_open(file), pre_buffer=True)


def plan_units(files: list[SourceFile], unit_bytes: int) -> list[Unit]:
    """Divide the files into units of about `unit_bytes` of text, at least one part each."""
    units: list[Unit] = []
    for file in files:
        first, size = 0, 0
        for number, part_bytes in enumerate(file.parts, start=1):
            size += part_bytes
            if size >= unit_bytes or number == len(file.parts):
                units.append(Unit(len(units), file.file, first, number, size))
                first, size = number, 0
    return units


def read_texts(unit: Unit, text_column: str) -> Iterator[bytes]:
    """The unit's texts as UTF-8 bytes; null becomes an empty text. Reads no further than it is asked to."""
    read = _read_lines if unit.file.endswith(JSON_LINES) else _read_parquet
    with _readable(unit.file):
        yield from read(unit.file, text_column, unit.first, unit.end)


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """Name the file, perhaps one of many, that cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def _read_parquet(file: str, text_column: str, first: int, end: int) -> Iterator[bytes]:
    with open_parquet(file) as parquet:
        for group in range(first, end):
            for batch in parquet.iter_batches(1000, row_groups=[group], columns=[text_column], use_threads=False):
                column = batch.column(0)
                # as bytes, because a column of strings may hold invalid UTF-8
                binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
                yield from (text or b"" for text in column.cast(binary).to_pylist())


def _read_lines(file: str, text_column: str, first: int, end: int) -> Iterator[bytes]:
    with _open(file) as stream:
        position = 0
        if first:
            stream.seek(first * BLOCK - 1)  # finds a line that begins at the block, because the previous one ends here
            position = first * BLOCK - 1 + len(stream.readline())
        for line in stream:
            if position >= end * BLOCK:
                return
            if line.strip():
                yield _text_of(line, text_column, f"{file}, line at byte {position}")
            position += len(line)


def _text_of(line: bytes, text_column: str, where: str) -> bytes:
    try:
        text = json.loads(line)[text_column]
        if not isinstance(text, str | None):
            raise TypeError(f"{text!r:.40} is not text")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{where}: should be an object with text as {text_column!r}: {error!r} (--text-column)"
        ) from None
    return (text or "").encode("utf-8", "surrogatepass")

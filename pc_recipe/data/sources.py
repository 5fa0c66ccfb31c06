"""Reads text from parquet files, on this machine or on the Hub, divided into units of work."""

import glob
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from pc.errors import UserError

SUFFIX = ".parquet"
HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+")
BATCH = 8
"""documents read and encoded together: more are no faster, and a file of 0.2 MB may hold one text of 100 MB many times"""


@dataclass(frozen=True)
class SourceFile:
    """One file: path or hf:// address, bytes, and the uncompressed bytes of text in each row group."""

    file: str
    size: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Row groups `first` to `end` - 1 of one file, which become one shard per split."""

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
    wrong = [file for file in files if not file.endswith(SUFFIX)]
    if wrong or not files:
        raise UserError(
            f"--input {(wrong or [source])[0]}: no parquet file, folder or glob pattern of such, or Hub dataset "
            "owner/name (docs/data.md shows how to convert)"
        )
    return files


def find_local_files(source: str) -> list[str] | None:
    """The files of `source` on this machine, sorted; None if it is neither a file, a folder nor a glob pattern."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(map(str, path.rglob(f"*{SUFFIX}")))
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


def measure_files(files: list[str], text_column: str) -> list[SourceFile]:
    """The files' sizes and row groups; reads footers only, and checks that there is a column of text."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda file: _measure_file(file, text_column), files))


def _measure_file(file: str, text_column: str) -> SourceFile:
    with open_parquet(file) as parquet:
        schema = parquet.schema_arrow
        kind = schema.field(text_column).type if text_column in schema.names else None
        if kind not in (pa.string(), pa.large_string(), pa.binary()):
            raise UserError(
                f"{file}: column {text_column!r} should hold text; columns are {', '.join(schema.names)} (--text-column)"
            )
        metadata = parquet.metadata
        column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_column)
        groups = [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]
        return SourceFile(file, size_of(file), tuple(group.total_uncompressed_size for group in groups))


def size_of(file: str) -> int:
    """Bytes of a local path or an hf:// address."""
    file_system, path = fsspec.url_to_fs(file)
    return file_system.size(path)


@contextmanager
def open_parquet(file: str) -> Iterator[pq.ParquetFile]:
    """A local path or an hf:// address; an error in reading names the file, perhaps one of many."""
    try:
        file_system, path = fsspec.url_to_fs(file)
        with pq.ParquetFile(path, filesystem=file_system, pre_buffer=True) as parquet:
            yield parquet
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def divide_into_units(files: list[SourceFile], unit_bytes: float) -> list[Unit]:
    """Divide the files into units of about `unit_bytes` of text, at least one row group each."""
    units: list[Unit] = []
    for file in files:
        first, size = 0, 0
        for number, group_bytes in enumerate(file.groups, start=1):
            size += group_bytes
            if size >= unit_bytes or number == len(file.groups):
                units.append(Unit(len(units), file.file, first, number, size))
                first, size = number, 0
    return units


def read_texts(unit: Unit, text_column: str) -> Iterator[bytes]:
    """The unit's texts as UTF-8 bytes; null becomes an empty text. Reads no further than it is asked to."""
    with open_parquet(unit.file) as parquet:
        for group in range(unit.first, unit.end):
            for batch in parquet.iter_batches(BATCH, row_groups=[group], columns=[text_column], use_threads=False):
                # as bytes, because a column of strings may hold invalid UTF-8
                yield from (text or b"" for text in batch.column(0).cast(pa.large_binary()).to_pylist())

"""Where the text comes from: parquet files, local or on the Hub, cut into units of work."""

import glob
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pc.errors import UserError


@dataclass(frozen=True)
class Unit:
    """Consecutive row groups of one parquet file, which become one shard per split.

    rows, text_bytes: how much that is (text_bytes as stored in parquet, uncompressed).
    """

    number: int
    file: str
    first_row_group: int
    end_row_group: int
    rows: int
    text_bytes: int


@dataclass(frozen=True)
class SourceFile:
    """One parquet file: path or hf:// address, bytes, rows and the rows and text bytes of each row group."""

    file: str
    size: int
    rows: int
    row_groups: tuple[tuple[int, int], ...]

    def summary(self) -> dict[str, Any]:
        return {"name": self.file.rsplit("/", 1)[-1], "size": self.size, "rows": self.rows}


def find_files(source: str, subset: str | None = None) -> list[str]:
    """Parquet files behind `source`: a file, a folder, a glob pattern or a Hub dataset `owner/name`."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*.parquet"))
    elif path.is_file():
        files = [str(path)]
    elif any(sign in source for sign in "*?["):
        files = sorted(glob.glob(str(path), recursive=True))
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return find_hub_files(source, subset)
    else:
        raise UserError(f"--input {source} is no file, folder, glob pattern or Hub dataset owner/name")
    if subset is not None:
        raise UserError(f"--subset names a part of a Hub dataset, but --input {source} is local")
    if not files:
        raise UserError(f"--input {source} matches no parquet file")
    return files


def find_hub_files(dataset: str, subset: str | None) -> list[str]:
    """hf:// addresses of the dataset's files, pinned to the revision that the Hub has now."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset, subset)
    except Exception as error:  # unknown dataset, unknown subset, no network, no access: all say so themselves
        raise UserError(f"Hub dataset {dataset!r}, subset {subset!r}: {error}") from error
    files = [str(file) for file in builder.config.data_files["train"]]
    if not all(file.endswith(".parquet") for file in files):
        raise UserError(f"Hub dataset {dataset!r} is not stored as parquet")
    return files


def read_footers(files: list[str], text_column: str) -> list[SourceFile]:
    """What the files' footers say; checks that each has the text column."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda file: _read_footer(file, text_column), files))


def _read_footer(file: str, text_column: str) -> SourceFile:
    with open_parquet(file) as parquet:
        schema = parquet.schema_arrow
        if text_column not in schema.names:
            raise UserError(f"{file} has no column {text_column!r}; it has {', '.join(schema.names)} (--text-column)")
        kind = schema.field(text_column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)):
            raise UserError(f"column {text_column!r} of {file} holds {kind}, not text")
        metadata = parquet.metadata
        column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_column)
        groups = tuple(
            (metadata.row_group(i).num_rows, metadata.row_group(i).column(column).total_uncompressed_size)
            for i in range(metadata.num_row_groups)
        )
        return SourceFile(file, _size(file), metadata.num_rows, groups)


def open_parquet(file: str) -> pq.ParquetFile:
    """Open a local path or an hf:// address."""
    try:
        if "://" not in file:
            return pq.ParquetFile(file, memory_map=True)
        import fsspec

        file_system, path = fsspec.url_to_fs(file)
        return pq.ParquetFile(path, filesystem=file_system, pre_buffer=True)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} is not a readable parquet file: {error}") from error


def _size(file: str) -> int:
    if "://" not in file:
        return Path(file).stat().st_size
    import fsspec

    file_system, path = fsspec.url_to_fs(file)
    return file_system.size(path)


def plan_units(files: list[SourceFile], unit_bytes: int) -> list[Unit]:
    """Cut the files into units of about `unit_bytes` of text, never finer than a row group."""
    units: list[Unit] = []
    for file in files:
        first, rows, size = 0, 0, 0
        for number, (group_rows, group_bytes) in enumerate(file.row_groups, start=1):
            rows, size = rows + group_rows, size + group_bytes
            if size >= unit_bytes or number == len(file.row_groups):
                units.append(Unit(len(units), file.file, first, number, rows, size))
                first, rows, size = number, 0, 0
    return units

"""Reads text from parquet, JSON lines and text files, local or on the Hub, divided into units of work."""

import glob
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pc.data.text_files import PARQUET, TEXT, groups_of, kind_of, texts_of
from pc.errors import UserError

BATCH_ROWS, BATCH_BYTES = 1000, 2**24  # documents per batch; fewer if they are long


@dataclass(frozen=True)
class Unit:
    """Consecutive row groups of one file, or several text files, which become one shard per split.

    rows, text_bytes: its size (text_bytes uncompressed, as stored). more_files: text files after the first.
    """

    number: int
    file: str
    first_row_group: int
    end_row_group: int
    rows: int
    text_bytes: int
    more_files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SourceFile:
    """One file: path or hf:// address, bytes, rows, and (rows, text bytes) of each row group."""

    file: str
    size: int
    rows: int
    row_groups: tuple[tuple[int, int], ...]

    def summary(self) -> dict[str, Any]:
        return {"name": self.file.rsplit("/", 1)[-1], "size": self.size, "rows": self.rows}


def find_files(source: str, subset: str | None = None) -> list[str]:
    """The files of `source`: a file, a folder, a glob pattern or a Hub dataset `owner/name`; all of one kind."""
    files = find_local_files(source)
    if files is None:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            return find_hub_files(source, subset)
        raise UserError(f"--input {source} is not a file, folder, glob pattern or Hub dataset owner/name")
    if subset is not None:
        raise UserError(f"--subset selects a part of a Hub dataset, but --input {source} is local")
    if not files:
        raise UserError(f"--input {source} matches no parquet, JSON lines or text file")
    return _of_one_kind(source, files)


def find_local_files(source: str) -> list[str] | None:
    """The files of `source` on this machine, sorted; None if it is neither a file, a folder nor a glob pattern."""
    path = Path(source).expanduser()
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if kind_of(file.name) and file.is_file())
    if path.is_file():
        return [str(path)]
    if any(sign in source for sign in "*?["):
        return sorted(glob.glob(str(path), recursive=True))
    return None


def _of_one_kind(source: str, files: list[str]) -> list[str]:
    unknown = [file for file in files if kind_of(file) is None]
    if unknown:
        raise UserError(
            f"{unknown[0]}: the name should end in .parquet, .jsonl or .txt; the last two may have .gz or .zst added"
        )
    kinds = Counter(kind_of(file) for file in files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        raise UserError(
            f"--input {source} has files of several kinds ({counts}); choose one with a pattern such as '*.jsonl'"
        )
    return files


def find_hub_files(dataset: str, subset: str | None) -> list[str]:
    """hf:// addresses of the dataset's files, pinned to the current revision on the Hub."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset, subset)
    except Exception as error:  # unknown dataset or subset, no network, no access: the message explains it
        raise UserError(f"Hub dataset {dataset!r}, subset {subset!r}: {error}") from error
    files = [str(file) for file in builder.config.data_files["train"]]
    return _of_one_kind(dataset, files)


def read_footers(files: list[str], text_column: str) -> list[SourceFile]:
    """Sizes of the files, from parquet footers or by reading other files once; checks for the text column."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda file: _read_footer(file, text_column), files))


def _read_footer(file: str, text_column: str) -> SourceFile:
    if kind_of(file) != PARQUET:
        groups = groups_of(file, text_column)
        return SourceFile(file, size_of(file), sum(rows for rows, _ in groups), groups)
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
        return SourceFile(file, size_of(file), metadata.num_rows, groups)


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


def size_of(file: str) -> int:
    """Bytes of a local path or an hf:// address."""
    if "://" not in file:
        return Path(file).stat().st_size
    import fsspec

    file_system, path = fsspec.url_to_fs(file)
    return file_system.size(path)


def plan_units(files: list[SourceFile], unit_bytes: int) -> list[Unit]:
    """Divide the files into units of about `unit_bytes` of text, at least a row group; combines text files."""
    units: list[Unit] = []
    for file in files:
        last = units[-1] if units else None
        if kind_of(file.file) == TEXT and last is not None and last.text_bytes < unit_bytes:
            ((_, size),) = file.row_groups
            more = [*last.more_files, file.file]
            units[-1] = replace(last, rows=last.rows + 1, text_bytes=last.text_bytes + size, more_files=more)
            continue
        first, rows, size = 0, 0, 0
        for number, (group_rows, group_bytes) in enumerate(file.row_groups, start=1):
            rows, size = rows + group_rows, size + group_bytes
            if size >= unit_bytes or number == len(file.row_groups):
                units.append(Unit(len(units), file.file, first, number, rows, size))
                first, rows, size = number, 0, 0
    return units


def read_rows(unit: Unit, text_column: str) -> Iterator[list[bytes]]:
    """The unit's texts as UTF-8 bytes, in batches; null becomes an empty text."""
    if kind_of(unit.file) == PARQUET:
        yield from _read_parquet(unit, text_column)
        return
    batch, size = [], 0
    for file in [unit.file, *unit.more_files]:
        for text in texts_of(file, text_column, unit.first_row_group, unit.end_row_group):
            batch.append(text)
            size += len(text)
            if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _read_parquet(unit: Unit, text_column: str) -> Iterator[list[bytes]]:
    try:
        with open_parquet(unit.file) as parquet:
            groups = list(range(unit.first_row_group, unit.end_row_group))
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=groups, columns=[text_column], use_threads=False):
                column = batch.column(0)
                binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
                yield [text or b"" for text in column.cast(binary).to_pylist()]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{unit.file} cannot be read to its end: {error}") from error

"""Finds files with text, on this machine or on the Hub, divides them into units of work, and reads them."""

import json
import lzma
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pc.errors import UserError
from pc_recipe.data.manifest import Size
from pc_recipe.data.text_files import (
    BATCH,
    COMPRESSIONS,
    FIRST,
    HUB,
    READERS,
    ending_of,
    is_compressed,
    open_bytes,
    require_text_column,
    texts_in,
)
from pc_recipe.files import look
from pc_recipe.files.inside import inside

PARQUET = ".parquet"
TEXT_IN_COMPRESSED = 3  # bytes of text per byte of a compressed file, roughly
ENDINGS = (PARQUET, *READERS)
HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+")
_OTHER_SPLIT = re.compile(
    r"(?<![^\W\d_])(validation|valid|dev|val|test|testing|eval|evaluation)(?![^\W\d_])", re.IGNORECASE
)
"""a word by which `datasets` knows the files of a split other than train; it may be any word of a path"""
_LOGS = {
    "_delta_log": "a Delta Lake table",
    ".hoodie": "a Hudi table",
    "_spark_metadata": "written by a stream of Spark",
}
"""folders beside files of which some may be old, deleted or never finished; the log alone says which"""
_DESCRIPTIONS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""of data sets; the first four, and README.md, `datasets` skips too"""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class SourceFile:
    """One file: path or hf:// address, size, and the bytes of text in each group, which is read as a whole.

    The groups of a parquet file are its row groups; any other file is one group, or none if empty.
    """

    file: str
    size: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Groups of one or more files, which become one shard or more per split.

    groups: {file: (first, last + 1)}. text_bytes: their text, as `measure_files` estimates it.
    """

    number: Size
    groups: dict[str, tuple[int, int]]
    text_bytes: Size


def find_files(
    sources: Sequence[str], left_out: Counter[str], subset: str | None = None, output: Path | None = None
) -> list[str]:
    """The files of `sources`, each a file, a folder or a Hub dataset `owner/name`.

    output: its files are left out, if it is in a folder of `sources`. left_out: counts other files that are left out,
    by reason.
    """
    files = [file for source in sources for file in _find_files(source, subset, output, left_out)]
    if odd := next(filter(_NOT_UTF8.search, files), None):  # the job's record, JSON, could not name it
        raise UserError(f"--input {odd}: its name is not UTF-8; rename it")
    found = unique(files)
    left_out["named twice"] += len(files) - len(found)
    return found


def unique(files: Iterable[str]) -> list[str]:
    """The first name of each file; a link counts as the file that it leads to."""
    found: dict[str, str] = {}
    for file in files:
        found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def _find_files(source: str, subset: str | None, output: Path | None, left_out: Counter[str]) -> list[str]:
    files = find_local_files(source, subset, output, left_out)
    if files is None:
        if not HUB_DATASET.fullmatch(source) or has_text(source):
            raise UserError(f"--input {source}: no such file, folder or Hub dataset owner/name")
        files = find_hub_files(source, subset)
    other = [file for file in files if not has_text(file)]
    if len(other) == len(files):
        raise UserError(
            f"--input {(other or [source])[0]}: no text file; these end in {', '.join(ENDINGS)}, all but parquet and arrow "
            f"also with {', '.join(COMPRESSIONS)}"
        )
    left_out.update(f"of the ending {ending_of(file)!r}" for file in other)
    return [file for file in files if has_text(file)]


def has_text(file: str | Path) -> bool:
    """Whether the ending of a file's name is known."""
    return ending_of(str(file)) in ENDINGS


def find_local_files(source: str, subset: str | None, output: Path | None, left_out: Counter[str]) -> list[str] | None:
    """The files of `source` on this machine, sorted; None if it is neither a file nor a folder.

    Links in a folder are followed. Left out are hidden files, those of `output`, links to nothing, and what
    `_leave_out` leaves out.

    Raises:
        UserError: a link in the folder leads out of it, a table is in it, or it in one, or there is a `subset`, which only
            the Hub has.
    """
    path = Path(os.path.expanduser(source))
    if subset and look.is_there(path):  # a card on this machine may name any address
        raise UserError(
            f"--input {source} is a local path, but --subset selects part of a Hub dataset; give the folder of its files"
        )
    if not look.is_folder(path):
        return [str(path)] if look.is_file(path) else None
    for parent in Path(os.path.realpath(path)).parents:
        _require_no_table(parent)
    without = output and Path(os.path.abspath(output))
    found = (inside(path, str(file.relative_to(path))) for file in _walk(path, left_out))
    files = [file for file in found if without not in Path(os.path.abspath(file)).parents]
    present = [file for file in files if look.is_file(file)]
    left_out["links to nothing"] += len(files) - len(present)
    return sorted(map(str, _leave_out(present, path, left_out)))


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """The files below a folder that are not hidden; links are followed."""
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=look.refuse):
        if (real := os.path.realpath(place)) in visited:  # a link leads back
            folders.clear()
            continue
        visited.add(real)
        _require_no_table(Path(place))
        left_out["hidden"] += sum(name.startswith(".") for name in folders + names)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _require_no_table(folder: Path) -> None:
    """Raise a `UserError` for a folder of which a log says what still belongs to it."""
    kinds = [kind for name, kind in _LOGS.items() if look.is_folder(folder / name)]
    described = folder / "metadata"
    if look.is_folder(described) and any(".metadata.json" in name for name in look.names(described)):
        kinds.append("an Iceberg table")
    if kinds:
        raise UserError(
            f"--input {folder}: is {kinds[0]}, whose files also hold rows that no longer belong to it; export it with its "
            "own tool, such as to parquet"
        )


def _leave_out(files: list[Path], folder: Path, left_out: Counter[str]) -> list[Path]:
    """The files whose names, and those of their folders below `folder`, are of no split other than train.

    What describes a data set is left out too, as is what a folder of `datasets` no longer has.

    Raises:
        UserError: no file with text is left.
    """
    reasons = {
        file: "of another split than train" for file in files if _OTHER_SPLIT.search(str(file.relative_to(folder)))
    }
    others = sorted(map(str, filter(has_text, reasons)))
    card, saved = folder / "README.md", {}  # folders of `datasets.save_to_disk`, and which files these have
    for file in files:
        if file.name == "dataset_info.json" and (state := look.read(file.with_name("state.json"))):
            saved[file.parent] = _list_saved(state, file.parent)
    for file in files:
        if file.name in _DESCRIPTIONS or file == card and (look.read(card) or b"").startswith(b"---"):
            reasons[file] = "describing a data set"
        elif file.suffix == ".arrow" and file.name not in saved.get(file.parent, (file.name,)):
            reasons[file] = "of an older version of a data set"
    kept = [file for file in files if file not in reasons]
    if others and not any(map(has_text, kept)):
        raise UserError(
            f"--input {folder}: its files are of other splits than train, such as {others[0]}; to train on them, name "
            "the files themselves"
        )
    left_out.update(reasons.values())
    return kept


def _list_saved(state: bytes, folder: Path) -> set[str]:
    """Names of the files of a data set, by its state.json; a smaller one, saved over it, leaves others behind."""
    try:
        return {file["filename"] for file in json.loads(state)["_data_files"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'state.json'} does not list the files of a data set; save it again") from None


def find_hub_files(dataset: str, subset: str | None) -> list[str]:
    """hf:// addresses of the dataset's files, pinned to the current revision on the Hub."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(dataset, subset)
    except Exception as error:  # unknown dataset or subset, no network, no access: the message explains it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--input {dataset}: no such file or folder here, and as a Hub dataset (subset {subset!r}): {reason}"
        ) from error
    if "train" not in (splits := builder.config.data_files or {}):
        raise UserError(
            f"--input {dataset}: no split train, only {', '.join(map(str, splits))}; give the files of one as --input"
        )
    files = [str(file) for file in splits["train"]]
    if elsewhere := [file for file in files if not file.startswith(HUB)]:
        raise UserError(f"--input {dataset}: its card names {elsewhere[0]!r}, which is not on the Hub")
    return files


def measure_files(files: list[str], text_key: str) -> list[SourceFile]:
    """The files' sizes and groups; reads little of each, and checks that it has text under `text_key`."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda file: _measure_file(file, text_key), files))


def _measure_file(file: str, text_key: str) -> SourceFile:
    size = size_of(file)
    if size == 0:
        return SourceFile(file, 0, ())
    if ending_of(file) == PARQUET:
        return SourceFile(file, size, _row_groups(file, text_key))
    any(islice(_read(file, 0, 1, text_key), FIRST))  # up to a text: a mistake in the first lines or in --text-key
    return SourceFile(file, size, (size * TEXT_IN_COMPRESSED if is_compressed(file) else size,))


def _row_groups(file: str, text_column: str) -> tuple[int, ...]:
    """Uncompressed bytes of text in each row group; reads the footer only."""
    with open_parquet(file) as parquet:
        require_text_column(parquet.schema_arrow, text_column, file)
        metadata = parquet.metadata
        column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_column)
        groups = [metadata.row_group(i).column(column) for i in range(metadata.num_row_groups)]
        return tuple(group.total_uncompressed_size for group in groups)


def size_of(file: str) -> int:
    """Bytes of a local path or an hf:// address."""
    with open_bytes(file) as raw:
        return raw.seek(0, os.SEEK_END)


@contextmanager
def open_parquet(file: str) -> Iterator[pq.ParquetFile]:
    """A local path or an hf:// address; an error in reading names the file, perhaps one of many."""
    with _naming(file), open_bytes(file) as raw, pq.ParquetFile(raw, pre_buffer=True) as parquet:
        yield parquet


@contextmanager
def _naming(file: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, pa.ArrowException, lzma.LZMAError) as error:
        unpack = "; unpack it with zstd -d --long=31" if "too much memory" in str(error) else ""
        raise UserError(f"{file} cannot be read: {error}{unpack}") from error


def divide_into_units(files: list[SourceFile], unit_bytes: float) -> list[Unit]:
    """Divide the files into units of about `unit_bytes` of text, at least one group each.

    Row groups of different parquet files are in different units. Other files, which may be many and small, share units.
    """
    units: list[Unit] = []
    for _, neighbours in groupby(files, lambda file: file.file if ending_of(file.file) == PARQUET else ""):
        groups = [(file.file, number, size) for file in neighbours for number, size in enumerate(file.groups)]
        chosen: dict[str, tuple[int, int]] = {}
        total = 0
        for place, (file, number, size) in enumerate(groups, start=1):
            chosen[file] = chosen.get(file, (number,))[0], number + 1
            total += size
            if total >= unit_bytes or place == len(groups):
                units.append(Unit(len(units), chosen, total))
                chosen, total = {}, 0
    return units


def read_texts(unit: Unit, text_key: str, replaced: Counter[str], left_out: Counter[str]) -> Iterator[str]:
    """The unit's texts, except null and empty ones. Reads no further than it is asked to.

    replaced: counts, for each file, the bytes that are not UTF-8; each becomes U+FFFD. left_out: counts the texts that
    are left out.
    """
    for file, (first, end) in unit.groups.items():
        for text in _read(file, first, end, text_key):
            whole, count = _NOT_UTF8.subn("\ufffd", text or "")
            if count:
                replaced[file] += count
            if not whole:
                left_out["documents without text"] += 1
            else:
                yield whole


def _read(file: str, first: int, end: int, text_key: str) -> Iterator[str | None]:
    """Texts of some groups, in which a byte that is not UTF-8 is a surrogate."""
    if ending_of(file) == PARQUET:
        yield from _read_parquet(file, first, end, text_key)
    else:
        with _naming(file):
            yield from READERS[ending_of(file)](file, text_key)


def _read_parquet(file: str, first: int, end: int, text_column: str) -> Iterator[str]:
    with open_parquet(file) as parquet:
        for group in range(first, end):
            for batch in parquet.iter_batches(BATCH, row_groups=[group], columns=[text_column], use_threads=False):
                yield from texts_in(batch.column(0))

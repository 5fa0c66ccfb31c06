"""Reads documents from files other than parquet: JSON lines, CSV, plain text, Markdown, and Arrow as `datasets` saves it.

All but Arrow may be compressed. Each reader yields documents as text in which every byte that is not UTF-8 is one surrogate, as by Python's
`surrogateescape`; null is a document too. No reader holds more than a document or a line in memory.
"""

import csv
import io
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa

from pc.errors import UserError

HUB = "hf://"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4", ".xz": "xz"}
BATCH = 8
"""documents read and encoded together: more are no faster, and a column may hold one long text many times"""
TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
FIRST = 100
"""records that are looked at when a job starts; in JSON lines, one of them has to have the text key"""
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
LONE = "\udc0d"  # stands for a carriage return in the text of CSV; no byte that is not UTF-8 becomes it
LONGEST = 16_384
"""characters of a document from a text file, some 4,000 tokens; a longer file becomes several"""


def open_bytes(file: str) -> BinaryIO:
    """A local path or an hf:// address; no other name is an address."""
    return fsspec.filesystem("hf").open(file) if file.startswith(HUB) else open(file, "rb")


@contextmanager
def open_text(file: str) -> Iterator[io.TextIOWrapper]:
    """A local path or an hf:// address, decompressed, without a byte-order mark. No line ending is changed."""
    with open_bytes(file) as raw:
        compression = COMPRESSIONS.get(PurePosixPath(file.lower()).suffix)
        content: Any = raw
        if compression == "xz":  # which Arrow does not have
            content = lzma.open(raw)
        elif compression:
            content = pa.CompressedInputStream(raw, compression)
        stream: Any = io.BufferedReader(content)
        if stream.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{file}: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
        yield io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")


def read_json_lines(file: str, text_key: str) -> Iterator[str | None]:
    """A record without the key is a document without text: so some writers leave out empty texts and null."""
    # Arrow's reader refuses lines that are longer than its blocks, and keys whose type changes
    before, found = [], False  # the keys of records before the first with `text_key`
    with open_text(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                record = _record_of(line, text_key, f"{file}, line {number}")
                found = found or text_key in record
                if not found:
                    before.append(record.keys())
                    if len(before) == FIRST:
                        break
                yield record.get(text_key)
    if before and not found:
        keys = ", ".join(dict.fromkeys(chain(*before)))
        raise UserError(f"{file}: no key {text_key!r} in its first {len(before)} records; keys are {keys} (--text-key)")


def _record_of(line: str, text_key: str, where: str) -> dict[str, Any]:
    def require_one_text(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if [key for key, _ in pairs].count(text_key) > 1:
            raise ValueError(f"{text_key!r} twice")
        return dict(pairs)

    try:
        twice = line.count(f'"{text_key}"') > 1  # the check takes time
        record = json.loads(line, object_pairs_hook=require_one_text if twice else None)
        if not isinstance(record, dict):
            raise ValueError("an object is expected")
    except (ValueError, RecursionError) as error:
        array = "; for an array: jq -c '.[]' makes lines of it" if line.lstrip().startswith("[") else ""
        raise UserError(f"{where}: not a JSON object ({error}){array}") from None
    if not isinstance(text := record.get(text_key), str | None):
        raise UserError(f"{where}: {text_key!r} should hold text, not {text!r:.40} (--text-key)")
    return record


def read_csv(file: str, text_key: str) -> Iterator[str | None]:
    csv.field_size_limit(2**31 - 1)  # a document may be long
    with open_text(file) as stream:
        rows = csv.reader(_lines_of_csv(stream), strict=True)  # else an unclosed quote takes the rest as one text
        try:
            header: list[str] = next(filter(None, rows), [])
            if header:
                require_one_column(header, text_key, file)
            for row in filter(None, rows):  # without blank lines
                if len(row) != len(header):
                    raise csv.Error(
                        f"{len(row)} fields, the header has {len(header)}; a text with a comma needs quotes"
                    )
                yield row[header.index(text_key)].replace(LONE, "\r")
        except csv.Error as error:
            raise UserError(f"{file}, line {rows.line_num}: {error}") from None


def _lines_of_csv(stream: io.TextIOWrapper) -> Iterator[str]:
    """The lines, where a carriage return that is neither at the end of all lines nor before a line feed is `LONE`: text.

    Python's reader would end the row there, but writers such as pandas quote only a text with what ends their lines.
    """
    line, ends_lines = "", False
    for number, part in enumerate(stream):
        if number == 0:
            ends_lines = part.endswith("\r")
        if part.endswith("\r") and not ends_lines:
            line += part[:-1] + LONE
        else:
            yield line + part
            line = ""
    if line:
        yield line


def read_text(file: str, text_key: str) -> Iterator[str]:
    """The file as one document, or cut where possible: after a blank line, else after a line, else after a space."""
    with open_text(file) as stream:
        stream.reconfigure(newline=None)  # CRLF becomes LF
        text = ""
        while block := stream.read(LONGEST):
            text += block
            while len(text) > LONGEST:
                found = ((text.rfind(mark, LONGEST // 2, LONGEST), len(mark)) for mark in ("\n\n", "\n", " "))
                end = next((begin + length for begin, length in found if begin > 0), LONGEST)
                yield text[:end]
                text = text[end:]
        if text:
            yield text if text.strip() else ""


def read_arrow(file: str, text_key: str) -> Iterator[str]:
    """Record batches in a stream, as of `datasets`, or in a file with a footer, as of polars."""
    with open_bytes(file) as raw:
        whole = raw.read(6) == b"ARROW1"
        raw.seek(0)
        reader = pa.ipc.open_file(raw) if whole else pa.ipc.open_stream(raw)
        require_text_column(reader.schema, text_key, file)
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if whole else reader:
            column = batch.column(text_key)
            column = column.view(_BYTES.get(column.type, column.type))
            column.validate(full=True)  # nothing else checks where the texts lie in the batch
            for start in range(0, len(column), BATCH):
                yield from texts_in(column.slice(start, BATCH))


def require_one_column(columns: Sequence[str], text_column: str, file: str) -> None:
    if columns.count(text_column) != 1:
        which = f"{columns.count(text_column) or 'no'} columns {text_column!r}"
        raise UserError(f"{file}: {which}; columns are {', '.join(columns)} (--text-key)")


def require_text_column(schema: pa.Schema, text_column: str, file: str) -> None:
    """Raise a `UserError` unless one column has the name, and holds text."""
    require_one_column(schema.names, text_column, file)
    kind = schema.field(text_column).type
    if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in TEXTS:
        raise UserError(f"{file}: column {text_column!r} holds {kind}, not text (--text-key)")


def texts_in(column: pa.Array) -> Iterator[str]:
    # as bytes, because a column of strings may hold invalid UTF-8
    for text in column.cast(pa.large_binary()).to_pylist():
        yield (text or b"").decode("utf-8", errors="surrogateescape")


READERS: dict[str, Callable[[str, str], Iterator[str | None]]] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), read_json_lines),
    ".csv": read_csv,
    **dict.fromkeys((".txt", ".md"), read_text),
    ".arrow": read_arrow,
}
"""{ending: generator of the documents of a file, given it and the key or column with the text}"""


def is_compressed(file: str) -> bool:
    return PurePosixPath(file.lower()).suffix in COMPRESSIONS


def ending_of(file: str) -> str:
    """The ending that says what a file holds, in lower case and without that of a compression."""
    path = PurePosixPath(file.lower())
    return path.with_suffix("").suffix if is_compressed(file) else path.suffix

"""Files with one JSON object per line: a line is written whole or not at all, and damaged lines are skipped."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pc_recipe.files.errors import WriteFailed
from pc_recipe.files.inside import no_link

logger = logging.getLogger(__name__)

CHUNK = 2**20  # bytes read at once from the end


def append(path: str | Path, record: dict[str, Any]) -> None:
    """Append a line. Lines of several processes are never interleaved.

    Raises:
        WriteFailed: the file system refuses; the part of the line that it took is removed.
    """
    data = (json.dumps(record) + "\n").encode()
    try:
        with open(path, "ab", buffering=0, opener=no_link) as file:
            end, written = file.seek(0, os.SEEK_END), 0
            try:
                while written < len(data):  # a nearly full disk takes a part
                    written += file.write(data[written:])
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise WriteFailed(f"could not write {path}: {error.strerror or error}") from error


def read(path: str | Path) -> list[dict[str, Any]]:
    """All lines. A last line without a newline is left out silently: it is being written, or a crash cut it short."""
    with open(path, "rb") as file:
        records = [_parse(text) for text in file if text.endswith(b"\n")]
    if damaged := records.count(None):
        logger.warning(f"{path}: skipped {damaged} damaged lines")
    return [record for record in records if record is not None]


def read_back(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines from the last to the first; reads no more of the file than it is asked for."""
    with open(path, "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        first, is_whole = b"", False  # a line that begins in an earlier chunk; after the last newline, none is whole
        while begin > 0:
            end, begin = begin, max(0, begin - CHUNK)
            file.seek(begin)
            first, *others = (file.read(end - begin) + first).split(b"\n")
            for text in reversed(others):
                if is_whole and (record := _parse(text)) is not None:
                    yield record
                is_whole = True
        if is_whole and (record := _parse(first)) is not None:
            yield record


def cut_torn_end(path: str | Path) -> None:
    """Remove a last line that a crash cut short."""
    with open(path, "rb+", opener=no_link) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - CHUNK))
        end = file.read()
        file.truncate(size - len(end) + end.rfind(b"\n") + 1)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None

"""Inputs with mistakes and damage: values of a wrong type in a document, and files with wrong bytes."""

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ODD_VALUES = (None, "", 0, -1, 0.5, float("nan"), float("inf"), 10**24, True, [], {}, [None], {"a": 1}, "no/such\n\0")


SECONDS = 20  # that the answer to one may take


@contextmanager
def in_time():
    def end(*_):
        raise TimeoutError(f"still not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def changed_values(document: Any) -> Iterator[tuple[str, Any]]:
    """(change, changed copy) of a document: each part removed, or replaced by an odd value."""
    for place in list(_places(document)):
        name = ".".join(map(str, place))
        for value in ODD_VALUES:
            yield f"{name} = {value!r}", _with(document, place, value)
        yield f"no {name}", _with(document, place, _GONE)


_GONE = object()


def _places(document: Any, above: tuple = ()) -> Iterator[tuple]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*above, key)
        yield from _places(value, (*above, key))


def _with(document: Any, place: tuple, value: Any) -> Any:
    document = copy.deepcopy(document)
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    if value is _GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return document


WRONG_BYTES = {
    "empty": b"",
    "binary": bytes(range(256)) * 4,
    "latin-1": "name = 'é'".encode("latin-1"),
    "utf-16": "[]".encode("utf-16"),
    "null": b"null",
    "list": b"[]",
    "number": b"3",
    "text": b'"x"',
    "nested": b"[" * 100_000,
    "digits": b"1" * 10_000,
}


def changed_files(folder: Path, *files: Path) -> Iterator[tuple[str, Path]]:
    """`files` of a folder (default: all), one by one removed, made a folder, truncated, overwritten; then restored."""
    for file in files or sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        name = str(file.relative_to(folder))
        file.unlink()
        yield f"no {name}", file
        file.mkdir()
        yield f"{name} is a folder", file
        file.rmdir()
        for size in (len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            yield f"{name} cut to {size}", file
        for kind, content in WRONG_BYTES.items():
            file.write_bytes(content)
            yield f"{name}: {kind}", file
        file.write_bytes(whole)

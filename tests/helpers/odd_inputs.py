"""Inputs with mistakes and damage: odd values in a document, and files with wrong bytes."""

import copy
import json
import random
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pc.errors import UserError

SOAK = pytest.mark.parametrize("soak", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all"])
ODD_VALUES = (None, "", 0, -1, 0.5, float("nan"), float("inf"), 10**24, True, [], {}, [None], {"a": 1}, "no/such\n\0")
WRONG_BYTES = {
    "empty": b"", "binary": bytes(range(256)) * 4, "latin-1": "name = 'é'".encode("latin-1"), "null": b"null", "list": b"[]",
    "utf-16": "[]".encode("utf-16"), "number": b"3", "text": b'"x"', "nested": b"[" * 100_000, "digits": b"1" * 10_000,
}  # fmt: skip
SECONDS = 20  # that the answer to one may take
_GONE = object()


def complaint(read: Callable[[], Any], about: Path | str) -> str:
    """What a command says of its input; "" if it takes it. What it should not say begins with "!"."""
    try:
        with in_time():
            read()
    except UserError as error:
        fine = str(error).count("\n") <= 1 and str(about) in str(error) and "still not done" not in str(error)
        return str(error) if fine else f"! names nothing, in many lines, or too late: {str(error)[:300]}"
    except Exception as error:
        return f"! {type(error).__name__}: {str(error)[:300]}"
    return ""


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


def some(cases: Iterator, soak: bool, count: int) -> list:
    """All of them in the long test, else so many drawn at random."""
    cases = list(cases)
    return cases if soak else random.Random(0).sample(cases, min(count, len(cases)))


def changed_documents(file: Path) -> Iterator[tuple[str, bytes]]:
    """(change, content) of a TOML or JSON file, or of the first line of JSON lines: each part odd, or left out."""
    whole = file.read_text()
    first, rest = whole.split("\n", 1) if file.suffix == ".jsonl" else (whole, "")
    document = tomllib.loads(first) if file.suffix == ".toml" else json.loads(first)
    for place in list(_places(document)):
        for value in (*ODD_VALUES, _GONE):
            changed = _with(document, place, value)
            try:
                text = tomli_w.dumps(changed) if file.suffix == ".toml" else f"{json.dumps(changed)}\n{rest}"
            except (TypeError, ValueError):
                continue  # TOML has no null
            name = ".".join(map(str, place))
            yield f"{file.name}: " + (f"no {name}" if value is _GONE else f"{name} = {value!r}"), text.encode()


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


def changed_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of a folder, one by one removed, made a folder, cut, overwritten; then restored."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        name = str(file.relative_to(folder))
        file.unlink()
        yield f"no {name}", file
        file.mkdir()
        yield f"{name} is a folder", file
        file.rmdir()
        contents = {"cut to half": whole[: len(whole) // 2], "cut by one": whole[:-1], **WRONG_BYTES}
        for kind, content in contents.items():
            file.write_bytes(content)
            yield f"{name}: {kind}", file
        file.write_bytes(whole)

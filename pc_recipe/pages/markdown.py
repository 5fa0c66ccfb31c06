"""Markdown tables, and text of others escaped for Markdown."""

import re
from collections.abc import Iterable, Sequence


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table; every line ends with a newline."""
    return row(header) + "|---" * len(header) + "|\n" + "".join(map(row, rows))


def row(cells: Sequence[object]) -> str:
    """One line of a table; a bar in a cell does not end it."""
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |\n"


def literal(text: object) -> str:
    """Text escaped to show as it is, in one line: no links, headings or HTML."""
    return re.sub(r"([\\`\[\]<>&#])", r"\\\1", " ".join(str(text).split()))

"""The report in a terminal: tables, and progress with the time left."""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pc.matrices import Stored
from pc.measure import Conditioning, exact_singular_values, work
from pc.report import words

_PROBE = 1024  # rows of the matrix by which the machine's speed is estimated
_LONG = 3e11  # work of some twenty seconds, too short to announce


def announce_and_watch(weights: list[Stored]) -> Iterator[Stored]:
    """Say on stderr about how long it will take, then show which weight it is at and the time left."""
    console = Console(stderr=True)
    total = sum(map(work, weights))
    if total > _LONG:
        minutes = min(_probe_seconds() for _ in range(3)) * total / (5 * _PROBE**3) / 60
        console.print(f"{len(weights)} weights, about {minutes:.0f} min on this machine; --sample 4 takes four layers")
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        for stored in weights:
            progress.update(task, description=stored.name)
            yield stored
            progress.advance(task, work(stored))


def _probe_seconds() -> float:
    """Callers take the least of several: the first loads libraries, and others may be disturbed."""
    begun = time.perf_counter()
    exact_singular_values(torch.randn(_PROBE, _PROBE))
    return time.perf_counter() - begun


def show(models: dict[str, Conditioning]) -> None:
    """Print everything on stdout; colours and wrapping only in a terminal."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    if len(models) > 1:
        header, *rows = words.comparison(models)
        _print_table(console, header, rows, title="Condition numbers side by side")
    for name, found in models.items():
        console.print(Text(f"\n{name}", style="bold"))
        _print_table(console, words.BLOCK_HEADER, words.block_rows(found, of_layers=True))
        blocks, layers = words.cells(found)
        heat = [[layer, *map(_cell, row)] for layer, row in layers.items()]
        _print_table(console, ["layer", *blocks], heat, title="Condition number, and times that of a Gaussian matrix")
        _print_table(
            console, words.BLOCK_HEADER, words.block_rows(found, of_layers=False), title="Outside of the layers"
        )
        for line in (words.summary(found), words.advice(found), words.cost(found)):
            console.print(Text(line))
        for line in words.left_out(found):
            console.print(Text(f"left out: {line}"))
    console.print(Text(f"\n{words.LEGEND}"))


def _cell(matrices: Sequence) -> Text:
    if not matrices:
        return Text("")
    times = words.times(matrices)
    style = "red" if times >= 4 else "yellow" if times >= 1.5 else ""
    return Text(f"{words.number(words.condition(matrices))} ×{times:.2f}", style=style)


def _print_table(console: Console, header: Iterable[str], rows: Sequence[Sequence], title: str | None = None) -> None:
    if not rows:
        return
    if title:
        console.print(Text(f"\n{title}", style="italic"))
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(header):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)

"""The report as one file of HTML, without scripts, in light and dark, for any width."""

import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from pc.measure import Conditioning, Measured, gaussian_singular_values
from pc.report import draw, words

_CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --faint: #666d76; --line: #d5d9de; --soft: #f4f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15171a; --faint: #9aa2ac; --line: #383d44; --soft: #1f2227 } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem;
  padding: 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; border-top: 1px solid var(--line); padding-top: 1rem; margin-top: 2rem }
h1, h2, h3, p { overflow-wrap: anywhere }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { font-weight: 600; vertical-align: bottom; white-space: normal } th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper) }
.head { font-size: 1.1rem } .advice { background: var(--soft); padding: .8rem 1rem; border-left: 4px solid #8a6d1b }
small, .faint, figcaption { color: var(--faint); font-size: .85rem } .panels { display: flex; flex-wrap: wrap }
figure { flex: 1 1 18rem; max-width: 30rem; margin: 0 } figcaption { overflow-wrap: anywhere }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .8rem }
"""


def write(models: dict[str, Conditioning], output: Path) -> None:
    """Write the page of {name: model}; whoever opens it meanwhile sees the old one or the new one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(page(models), encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def page(models: dict[str, Conditioning]) -> str:
    parts = [f"<h1>Conditioning of {escape(', '.join(models))}</h1>"]
    if len(models) > 1:
        header, *rows = words.comparison(models)
        parts += ["<h2>Side by side</h2>", _table(header, rows)]
        parts += [
            "<p class=faint>Condition numbers, and how many times those of Gaussian matrices of the same shapes.</p>"
        ]
    for name, found in models.items():
        parts += _model(name, found)
    parts += ["<h2>What the advice rests on</h2>", _table(words.EVIDENCE[0], words.EVIDENCE[1:])]
    parts += [
        "<p class=faint>The condition number is that of the baseline's o, gate, up and down at the end. Each run, with its plan, "
        "is in docs/evidence.md of the project.</p>",
        f"<h2>How it is measured</h2><p class=faint>{escape(words.LEGEND)} {escape(words.HOW)}</p>",
        f"<details><summary>For a model card</summary><pre>{escape(words.card(models))}</pre></details>",
    ]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    title = f"<title>Conditioning of {escape(', '.join(models))}</title>"
    return f"<!doctype html><html lang=en><head>{head}{title}<style>{_CSS}</style></head><body>{''.join(parts)}</body></html>\n"


def _model(name: str, found: Conditioning) -> list[str]:
    parts = [
        f"<h2>{escape(name)}</h2>",
        f"<p class=head>{escape(words.summary(found))}</p>",
        f"<p class=advice>{escape(words.advice(found))}</p>",
        "<h3>By block</h3>",
        _table(words.BLOCK_HEADER, words.block_rows(found, of_layers=True)),
    ]
    blocks, rows = words.cells(found)
    if rows:
        parts += ["<h3>By layer</h3>", _heat_map(blocks, rows)]
    if found.matrices:
        parts += ["<h3>The worst and the median matrix</h3>", f"<div class=panels>{_histograms(found)}</div>"]
    if outside := words.block_rows(found, of_layers=False):
        parts += ["<h3>Outside of the layers</h3>", _table(words.BLOCK_HEADER, outside)]
    parts += [f"<p>{escape(words.cost(found))}</p>"]
    lines = "".join(f"<li>{escape(line)}</li>" for line in words.left_out(found))
    return [*parts, f"<p class=faint>Left out:</p><ul class=faint>{lines}</ul>" if lines else ""]


def _histograms(found: Conditioning) -> str:
    drawn = ""
    for which, matrix in words.worst_and_median(found).items():
        spectra = {"W": matrix.sigma, "Gaussian": gaussian_singular_values(*matrix.shape), "PC 4": matrix.sigma_at(4)}
        caption = f"{matrix.name}, {matrix.shape[0]} x {matrix.shape[1]}, condition number {words.number(matrix.figures.condition)}"
        drawn += f"<figure>{draw.svg(f'{which}: ×{matrix.ratio:.2f}', spectra)}<figcaption>{escape(caption)}</figcaption></figure>"
    return drawn


def _heat_map(blocks: Sequence[str], rows: dict[str, list[list[Measured]]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in ["layer", *blocks])
    body = "".join(f"<tr><td>{escape(layer)}</td>{''.join(map(_cell, row))}</tr>" for layer, row in rows.items())
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"


def _cell(matrices: Sequence[Measured]) -> str:
    """Orange where worse conditioned than a Gaussian matrix, blue where better: opaque at 32 times."""
    if not matrices:
        return "<td></td>"
    times = words.times(matrices)
    strength = min(abs(math.log2(times)) / 5, 1.0) * 0.85
    colour = f"rgba({'230,110,20' if times > 1 else '40,120,220'},{strength:.2f})"
    text = f"{words.number(words.condition(matrices))} <small>×{times:.2f}</small>"
    return f'<td style="background:{colour}">{text}</td>'


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in row)}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>{body}</table></div>"

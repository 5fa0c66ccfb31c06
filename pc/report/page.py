"""The report as one page."""

import math
from collections.abc import Collection, Sequence
from functools import partial
from html import escape
from pathlib import Path

from pc.measure import Conditioning, Measured, gaussian_singular_values
from pc.report import draw, html, words


def write(models: dict[str, Conditioning], output: Path, with_pc: Collection[str] = ()) -> None:
    """Write the page of {name: model}. Those in `with_pc` were trained with PC, so the page does not advise trying it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(models, with_pc), encoding="utf-8")


def page(models: dict[str, Conditioning], with_pc: Collection[str] = ()) -> str:
    parts = [f"<h1>Conditioning of {escape(', '.join(models))}</h1>"]
    if len(models) > 1:
        header, *rows = words.comparison(models)
        parts += ["<h2>Side by side</h2>", html.table(header, rows)]
        parts += [
            "<p class=faint>Condition numbers, and their ratios to those of Gaussian matrices of the same shapes.</p>"
        ]
    for name, found in models.items():
        parts += _model(name, found, words.WITH_PC if name in with_pc else words.advice(found))
    parts += ["<h2>What the advice rests on</h2>", html.table(words.EVIDENCE[0], words.EVIDENCE[1:])]
    parts += [
        "<p class=faint>The condition number is that of the baseline's o, gate, up and down at the end. Each run, with its plan, "
        "is in docs/should-i.md of the project.</p>",
        f"<h2>How it is measured</h2><p class=faint>{escape(words.LEGEND)} {escape(words.HOW)}</p>",
        f"<details><summary>For a model card</summary><pre>{escape(words.card(models))}</pre></details>",
    ]
    return html.document(f"Conditioning of {', '.join(models)}", parts)


def _model(name: str, found: Conditioning, advice: str) -> list[str]:
    parts = [
        f"<h2>{escape(name)}</h2>",
        f"<p class=head>{escape(words.summary(found))}</p>",
        f"<p class=advice>{escape(advice)}</p>",
        "<h3>By block</h3>",
        html.table(words.BLOCK_HEADER, words.block_rows(found, of_layers=True)),
    ]
    blocks, rows = words.cells(found)
    if rows:
        parts += ["<h3>By layer</h3>", _heat_map(blocks, rows)]
    if found.matrices:
        parts += ["<h3>The worst and the median matrix</h3>", f"<div class=panels>{_histograms(found)}</div>"]
    if outside := words.block_rows(found, of_layers=False):
        parts += ["<h3>Outside of the layers</h3>", html.table(words.BLOCK_HEADER, outside)]
    parts += [f"<p>{escape(words.cost(found))}</p>"]
    lines = "".join(f"<li>{escape(line)}</li>" for line in words.left_out(found))
    return [*parts, f"<p class=faint>Left out:</p><ul class=faint>{lines}</ul>" if lines else ""]


def _histograms(found: Conditioning) -> str:
    drawn = ""
    for which, matrix in words.worst_and_median(found).items():
        spectra = {"W": matrix.sigma, "Gaussian": gaussian_singular_values(*matrix.shape), "PC 4": matrix.sigma_at(4)}
        caption = f"{matrix.name}, {matrix.shape[0]} x {matrix.shape[1]}, condition number {words.number(matrix.figures.condition)}"
        drawing = draw.svg(f"{which}: ×{matrix.ratio:.2f}", partial(draw.histogram_of, spectra=spectra))
        drawn += f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"
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

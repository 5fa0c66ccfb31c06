"""One style for all plots of the project: PNG files that are legible in a README."""

import io
from pathlib import Path
from typing import Any

import matplotlib

from pc_recipe.files.atomic import write_atomically

matplotlib.use("Agg")  # works without a display

import matplotlib.pyplot as plt

matplotlib.rcdefaults()  # ignore a matplotlibrc, which may lie in the current folder and ask for LaTeX

STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def subplots(rows: int = 1, columns: int = 1, *, width: float = 4.2, height: float = 3.0, **kwargs):
    """`plt.subplots` in the project's style; `width` and `height` in inches per panel."""
    with plt.rc_context(STYLE):
        return plt.subplots(rows, columns, figsize=(width * columns, height * rows), **kwargs)


def legend_below(figure, axes) -> None:
    """One legend, of what is drawn in `axes`, below all panels, where it hides no line."""
    handles, labels = axes.get_legend_handles_labels()
    inches = 0.7 + 0.07 * max(map(len, labels), default=0)  # width of an entry
    columns = max(1, int(figure.get_figwidth() // inches))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def save(figure, path: str | Path, metadata: dict[str, str] | None = None) -> Path:
    """Write `figure` to `path` plus ".png", with `metadata` in the file, and close it; returns the file."""
    written, image = Path(f"{path}.png"), io.BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(image, metadata=metadata)
    plt.close(figure)
    write_atomically(written, image.getvalue())
    return written


def label_tokens(axes) -> None:
    """Label the x axis with training tokens in short form."""
    axes.set_xlabel("training tokens")
    axes.locator_params("x", nbins=6)  # the labels are long
    axes.xaxis.set_major_formatter(lambda value, _: short_tokens(value))


def short_tokens(number: float) -> str:
    """A short form of a number of tokens: 57 B, 2.62 M, 492 k."""
    for size, suffix in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * size:  # as it is rounded
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"

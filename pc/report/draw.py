"""Figures of the pages: histograms of singular values, and SVG that fits light and dark."""

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

BINS = 40
_TEXT = "#010203"  # a placeholder that no other element has; the page's own colour replaces it


def histogram(axes: Any, spectra: Mapping[str, Tensor]) -> None:
    """Draw singular values, relative to the largest of their matrix; all `spectra` in the same axes, labelled by name."""
    edges = [i / BINS for i in range(BINS + 1)]
    for i, (name, sigma) in enumerate(spectra.items()):
        axes.hist(sigma / sigma.max(), edges, histtype="stepfilled", color=f"C{i}", alpha=0.55, label=name)


def histogram_of(axes: Any, spectra: Mapping[str, Tensor]) -> None:
    """`histogram` with labelled axes."""
    histogram(axes, spectra)
    axes.set_xlabel("singular value / largest")
    axes.set_ylabel("count")


def svg(title: str, draw: Callable[[Any], None]) -> str:
    """What `draw` draws in its axes, as SVG, in the colour of the surrounding text, with a legend."""
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}
    style |= {"text.usetex": False, "text.parse_math": False}  # whatever a matplotlibrc of the current folder says
    style |= {"path.simplify_threshold": 1.0}  # in pixels; long curves would be most of the file
    style |= {f"axes.spines.{side}": False for side in ("top", "right")}
    colours = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(style | dict.fromkeys(colours, _TEXT)):
        figure = Figure(figsize=(4.0, 2.6), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.set_title(title, fontsize=9)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False)
        image = io.StringIO()
        figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    drawn = image.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(_TEXT, "currentColor")
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", drawn, count=1, flags=re.DOTALL)

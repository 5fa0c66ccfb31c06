"""Histograms and quantile curves of singular values."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pc.analysis.signals import BLOCK_TITLES
from pc.analysis.spectra import Spectra
from pc.common.plots import save, subplots
from pc.errors import UserError

HISTOGRAM_BLOCKS = ("o", "gate", "up", "down")
BINS = 40


def paper_layers(num_layers: int) -> list[int]:
    """Shallow, middle and deep layer, counted from 1: the paper's 2, 10 and 18 of 18."""
    return sorted({min(2, num_layers), num_layers // 2 + 1, num_layers})


def plot_histograms(all_spectra: Sequence[Spectra], layers: Sequence[int] | None, output: Path) -> Path:
    """Singular values over the largest one of their matrix: a row per layer, a column per block.

    Args:
        all_spectra: drawn in the same axes; effective weights with PC, raw weights without.
        layers: counted from 1; None takes `paper_layers`.
    """
    num_layers = min(spectra.num_layers for spectra in all_spectra)
    layers = layers or paper_layers(num_layers)
    if not all(1 <= layer <= num_layers for layer in layers):
        raise UserError(f"--layers {' '.join(map(str, layers))}: the model has layers 1 to {num_layers}")
    figure, panels = subplots(len(layers), len(HISTOGRAM_BLOCKS), width=2.5, height=1.9, sharex=True, squeeze=False)
    edges = np.linspace(0, 1, BINS + 1)
    for row, layer in zip(panels, layers, strict=True):
        for axes, block in zip(row, HISTOGRAM_BLOCKS, strict=True):
            for i, spectra in enumerate(all_spectra):
                sigma = spectra.effective[block][layer - 1]
                axes.hist(sigma / sigma[0], edges, color=f"C{i}", alpha=0.55, label=_label(spectra))
            axes.set_title(f"layer {layer}: {BLOCK_TITLES[block]}", fontsize=8)
        row[0].set_ylabel("count per bin")
    for axes in panels[-1]:
        axes.set_xlabel(r"$\sigma / \sigma_\mathrm{max}$")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return save(figure, output / "histograms")


def plot_quantiles(all_spectra: Sequence[Spectra], output: Path) -> Path:
    """Empirical quantile curves of normalised singular values, all layers of a block pooled."""
    blocks = [block for block in BLOCK_TITLES if all(block in spectra.raw for spectra in all_spectra)]
    figure, panels = subplots(2, -(-len(blocks) // 2), width=2.5, height=2.2, sharex=True, sharey=True)
    panels = panels.flatten()
    probabilities = np.linspace(0, 1, 201)
    for axes, block in zip(panels, blocks, strict=False):
        for i, spectra in enumerate(all_spectra):
            kinds = [("-", _label(spectra), spectra.effective[block])]
            if block in spectra.pc_blocks:
                kinds.append((":", f"{spectra.name}, raw W", spectra.raw[block]))
            for style, label, sigma in kinds:
                pooled = (sigma / sigma[:, :1]).flatten()
                axes.plot(probabilities, np.quantile(pooled, probabilities), style, color=f"C{i}", label=label)
        axes.set_title(BLOCK_TITLES[block])
        axes.set_xlabel("quantile")
        axes.tick_params(labelbottom=True)
    for axes in panels[:: len(panels) // 2]:
        axes.set_ylabel(r"$\sigma / \sigma_\mathrm{max}$")
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    for axes in panels[len(blocks) :]:
        axes.set_axis_off()
        axes.legend(handles.values(), handles.keys(), fontsize=7, loc="center")
    return save(figure, output / "quantiles")


def _label(spectra: Spectra) -> str:
    return f"{spectra.name}, PC(W)" if spectra.pc_blocks else spectra.name

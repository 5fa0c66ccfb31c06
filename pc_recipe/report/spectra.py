"""Histograms of the exact singular values of checkpoints."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pc.blocks import BLOCK_SUFFIXES
from pc.errors import UserError
from pc.report.draw import histogram
from pc.spectral import singular_values
from pc_recipe.evaluate import plain_weights
from pc_recipe.files.places import run_of
from pc_recipe.files.run_folder import find_newest_checkpoint, step_of
from pc_recipe.files.run_log import unique_names
from pc_recipe.pages.plots import legend_below, save, subplots

BLOCK_TITLES = {block.lower(): rf"$W_\mathrm{{{block}}}$" for block in ("Q", "K", "V", "O", "gate", "up", "down")}
BLOCKS = ("o", "gate", "up", "down")

Spectra = dict[tuple[int, str], Tensor]
"""{(layer counted from 1, block): singular values of the effective weight, descending [min(n, m)] in float64}."""


def named_checkpoints(sources: Sequence[Path]) -> dict[str, Path]:
    """{unique name: checkpoint} of run folders (their last checkpoints) or checkpoint folders.

    A checkpoint given twice appears once. A name is as much of the run's path as is needed, with the step if several
    checkpoints of a run are given.
    """
    checkpoints = list(dict.fromkeys(map(_checkpoint_of, sources)))
    runs = list(map(run_of, checkpoints))
    names = zip(unique_names(runs), runs, checkpoints, strict=True)
    return {name if runs.count(run) == 1 else f"{name}/{path.name}": path for name, run, path in names}


def _checkpoint_of(source: Path) -> Path:
    source = source.resolve()
    checkpoint = source if step_of(source) >= 0 else find_newest_checkpoint(source)
    if checkpoint is None:
        raise UserError(f"{source}: no run with a complete checkpoint (its config needs [checkpoint] enable = true)")
    return checkpoint


def compute(checkpoint: Path, layers: Sequence[int] | None = None) -> Spectra:
    """Singular values of `BLOCKS`, on the GPU if there is one; shows progress.

    Args:
        layers: counted from 1; None takes a shallow, a middle and a deep one: the paper's 2, 10 and 18 of 18.
    """
    run = plain_weights.load(checkpoint)
    last = run.model_args.n_layers
    layers = layers or sorted({min(2, last), last // 2 + 1, last})
    if not all(1 <= layer <= last for layer in layers):
        raise UserError(f"--layers {' '.join(map(str, layers))}: the model has layers 1 to {last}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    spectra = {}
    for layer, block in tqdm(list(itertools.product(layers, BLOCKS)), desc=str(checkpoint), unit="matrix", leave=False):
        weight = run.weights[f"layers.{layer - 1}.{BLOCK_SUFFIXES[block][0]}.weight"]
        spectra[layer, block] = singular_values(weight.to(device)).flip(-1).cpu()
    return spectra


def plot(spectra: dict[str, Spectra], output: Path) -> Path:
    """Singular values over the largest one of their matrix: a row per layer, a column per block.

    Args:
        spectra: {name: spectra of the same layers}, drawn in the same axes.
    """
    layers = sorted({layer for values in spectra.values() for layer, _ in values})
    figure, panels = subplots(len(layers), len(BLOCKS), width=2.5, height=1.9, sharex=True, squeeze=False)
    for row, layer in zip(panels, layers, strict=True):
        for axes, block in zip(row, BLOCKS, strict=True):
            histogram(axes, {name: values[layer, block] for name, values in spectra.items()})
            axes.set_title(f"layer {layer}: {BLOCK_TITLES[block]}", fontsize=8)
        row[0].set_ylabel("count per bin")
    for axes in panels[-1]:
        axes.set_xlabel(r"$\sigma / \sigma_\mathrm{max}$")
    legend_below(figure, panels[0, 0])
    return save(figure, output / "histograms")


def both_weights(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """{"PC(W)" and, unless the checkpoint holds weights alone, "W", or "" in a run without PC: {TorchTitan's name:
    tensor}}, on the CPU, in the saved dtype."""
    run = plain_weights.load(checkpoint)
    orig = {name: f"{name}_orig" for name in run.weights if f"{name}_orig" in run.folder.shapes()}
    if not run.method.enable:
        return {"": run.weights}
    read = run.folder.read_tensors([*orig.values()])
    raw = {"W": run.weights | {name: read[key] for name, key in orig.items()}} if orig else {}
    return raw | {"PC(W)": run.weights}

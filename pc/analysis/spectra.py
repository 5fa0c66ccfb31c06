"""Exact singular values of checkpoints, computed once and kept in their runs' folders, and their histograms."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pc.analysis.signals import BLOCK_TITLES
from pc.common import markdown
from pc.common.files import write_atomically
from pc.common.plots import save, subplots
from pc.common.run_folder import INDEX, newest_checkpoint, step_of, unique_names
from pc.common.spectra import modified_condition_number, singular_values
from pc.config import BLOCK_GROUPS, BLOCK_SUFFIXES, PCConfig
from pc.errors import UserError
from pc.evaluate import plain_weights

HISTOGRAM_BLOCKS = ("o", "gate", "up", "down")
BINS = 40


@dataclass(frozen=True)
class Spectra:
    """Singular values of every linear layer of the blocks of one checkpoint, descending.

    `raw[block]` and `effective[block]` are [layers, min(n, m)]; they are equal without PC.
    """

    name: str
    step: int
    pc_blocks: tuple[str, ...]
    """Blocks with PC; empty for a baseline."""
    raw: dict[str, Tensor]
    effective: dict[str, Tensor]

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.raw.values())))

    def gmcn(self, blocks: Sequence[str], effective: bool = True) -> float:
        """Geometric mean of the modified condition numbers of `blocks`, all layers (paper, section 4.2)."""
        values = self.effective if effective else self.raw
        return math.exp(torch.cat([modified_condition_number(values[block]).log() for block in blocks]).mean().item())


def of_sources(sources: Sequence[Path]) -> list[Spectra]:
    """Spectra of run folders (their last checkpoints) or checkpoint folders, with unique names.

    One that is given twice is read once. A name is as much of the run's path as is needed, and the step where a run is
    given with several.
    """
    checkpoints = list(dict.fromkeys(map(_checkpoint_of, sources)))
    runs = [run_of(checkpoint) for checkpoint in checkpoints]
    names = [
        name if runs.count(run) == 1 else f"{name}/{checkpoint.name}"
        for checkpoint, run, name in zip(checkpoints, runs, unique_names(runs), strict=True)
    ]
    return list(map(_of_checkpoint, checkpoints, names))


def run_of(checkpoint: Path) -> Path:
    """The run's folder of RUN/checkpoint/step-N."""
    return checkpoint.parent.parent


def _checkpoint_of(source: Path) -> Path:
    """`source`, or the last checkpoint of a run's folder; it need not exist any more if its spectra do."""
    source = source.resolve()
    stored = [source / "checkpoint" / file.stem for file in (source / "spectra").glob("*.npz")]
    found = source if step_of(source) >= 0 else newest_checkpoint(source) or max(stored, key=step_of, default=None)
    if found is None:
        raise UserError(f"{source}: no run with a complete checkpoint (its config needs [checkpoint] enable = true)")
    return found


def _of_checkpoint(checkpoint: Path, name: str) -> Spectra:
    """Read from RUN/spectra/step-N.npz, which is written first if the checkpoint is newer."""
    stored, index = run_of(checkpoint) / "spectra" / f"{checkpoint.name}.npz", checkpoint / INDEX
    if not stored.exists() or (index.exists() and index.stat().st_mtime > stored.stat().st_mtime):
        _store(checkpoint, stored, name)
    with np.load(stored, allow_pickle=False) as file:
        arrays = {key: torch.from_numpy(file[key]).double() for key in file.files if "." in key}
    raw = {block: arrays[f"raw.{block}"] for block in BLOCK_SUFFIXES}
    effective = {block: arrays.get(f"effective.{block}", values) for block, values in raw.items()}
    with_pc = tuple(block for block in raw if f"effective.{block}" in arrays)
    return Spectra(name, step_of(checkpoint), with_pc, raw, effective)


def _store(checkpoint: Path, file: Path, name: str) -> None:
    """Compute the singular values of every matrix in float64, on the GPU if there is one. Shows progress.

    The file has raw.BLOCK and, with PC, effective.BLOCK, [layers, min(n, m)] in float32.
    """
    run = plain_weights.load(checkpoint)
    saved = run.folder.shapes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, list[np.ndarray]] = {}
    layers = range(run.model_args.n_layers)
    places = [(block, suffix, i) for block, (suffix, *_) in BLOCK_SUFFIXES.items() for i in layers]
    for block, suffix, i in tqdm(places, desc=f"singular values of {name}", unit="matrix", leave=False):
        weight, prefix = f"layers.{i}.{suffix}.weight", f"pc.layers.{i}.{suffix}."
        matrices = {f"raw.{block}": run.weights[weight]}
        if f"{prefix}u" in saved:
            key = f"{prefix}raw" if f"{prefix}raw" in saved else weight  # schedule "forward" keeps W as the weight
            matrices = {f"raw.{block}": run.folder.read_tensors([key])[key], f"effective.{block}": run.weights[weight]}
        for kind, matrix in matrices.items():
            sigma = singular_values(matrix.to(device)).flip(-1)
            found.setdefault(kind, []).append(sigma.float().numpy(force=True))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{kind: np.stack(rows) for kind, rows in found.items()})
    write_atomically(file, buffer.getvalue())


def table(all_spectra: Sequence[Spectra]) -> str:
    """Geometric means of the modified condition numbers, as Markdown."""
    default_blocks = [block for entry in PCConfig.blocks for block in BLOCK_GROUPS.get(entry, (entry,))]
    rows = []
    for spectra in all_spectra:
        for effective in (False, True) if spectra.pc_blocks else (False,):
            kind = "raw W" if not effective else f"PC(W) in {', '.join(spectra.pc_blocks)}"
            groups = (default_blocks, ("q", "k", "v"), tuple(spectra.raw))
            numbers = [f"{spectra.gmcn(blocks, effective):.2f}" for blocks in groups]
            rows.append([spectra.name, f"{spectra.step:,}", kind, *numbers])
    return markdown.table(["run", "step", "weights", "o, gate, up, down", "q, k, v", "all"], rows)


def paper_layers(num_layers: int) -> list[int]:
    """Shallow, middle and deep layer, counted from 1: the paper's 2, 10 and 18 of 18."""
    return sorted({min(2, num_layers), num_layers // 2 + 1, num_layers})


def plot(all_spectra: Sequence[Spectra], layers: Sequence[int] | None, output: Path) -> Path:
    """Histograms of singular values over the largest one of their matrix: a row per layer, a column per block.

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
                label = f"{spectra.name}, PC(W)" if spectra.pc_blocks else spectra.name
                axes.hist(sigma / sigma[0], edges, color=f"C{i}", alpha=0.55, label=label)
            axes.set_title(f"layer {layer}: {BLOCK_TITLES[block]}", fontsize=8)
        row[0].set_ylabel("count per bin")
    for axes in panels[-1]:
        axes.set_xlabel(r"$\sigma / \sigma_\mathrm{max}$")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return save(figure, output / "histograms")

"""Exact singular values of a checkpoint's matrices, computed once and saved in a small file."""

import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pc.common import markdown
from pc.common.files import write_atomically
from pc.common.run_folder import INDEX, newest_checkpoint, unique_names
from pc.common.spectra import modified_condition_number, singular_values
from pc.config import BLOCK_GROUPS, BLOCK_SUFFIXES, PCConfig
from pc.errors import UserError
from pc.evaluate import plain_weights


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
    checkpoint: str = ""
    """Path of the checkpoint, so that stored values are never taken for those of another."""

    @property
    def num_layers(self) -> int:
        return len(next(iter(self.raw.values())))

    def gmcn(self, blocks: Sequence[str], effective: bool = True) -> float:
        """Geometric mean of the modified condition numbers of `blocks`, all layers (paper, section 4.2)."""
        values = self.effective if effective else self.raw
        return math.exp(torch.cat([modified_condition_number(values[block]).log() for block in blocks]).mean().item())


def compute(checkpoint: str | Path, name: str) -> Spectra:
    """Compute the singular values of every matrix in float64, on the GPU if there is one. Shows progress."""
    run = plain_weights.load(checkpoint)
    saved = run.folder.shapes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    raw: dict[str, list[Tensor]] = {block: [] for block in BLOCK_SUFFIXES}
    effective: dict[str, list[Tensor]] = {block: [] for block in BLOCK_SUFFIXES}
    with_pc = set()
    places = [
        (block, suffix, i) for block, (suffix, *_) in BLOCK_SUFFIXES.items() for i in range(run.model_args.n_layers)
    ]
    for block, suffix, i in tqdm(places, desc=f"singular values of {name}", unit="matrix", leave=False):
        weight, prefix = f"layers.{i}.{suffix}.weight", f"pc.layers.{i}.{suffix}."
        effective[block].append(singular_values(run.weights[weight].to(device)).flip(-1).cpu())
        raw[block].append(effective[block][-1])
        if f"{prefix}u" in saved:
            key = f"{prefix}raw" if f"{prefix}raw" in saved else weight  # schedule "forward" keeps W as the weight
            raw[block][-1] = singular_values(run.folder.read_tensors([key])[key].to(device)).flip(-1).cpu()
            with_pc.add(block)
    stacked = [{block: torch.stack(rows) for block, rows in of.items()} for of in (raw, effective)]
    blocks = tuple(block for block in BLOCK_SUFFIXES if block in with_pc)
    return Spectra(name, run.step, blocks, *stacked, str(Path(checkpoint).resolve()))


def save(spectra: Spectra, path: Path) -> None:
    """Save as a compressed .npz in float32, 4 bytes per singular value; equal ones are stored once."""
    arrays = {f"raw.{block}": values.float().numpy() for block, values in spectra.raw.items()}
    arrays |= {f"effective.{block}": spectra.effective[block].float().numpy() for block in spectra.pc_blocks}
    about = {key: getattr(spectra, key) for key in ("name", "step", "pc_blocks", "checkpoint")}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, about=np.array(json.dumps(about)), **arrays)
    write_atomically(path, buffer.getvalue())


def load(path: str | Path) -> Spectra:
    """Read a file of `save`."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        arrays = {key: torch.from_numpy(file[key]) for key in file.files if key != "about"}
    raw = {key.removeprefix("raw."): values for key, values in arrays.items() if key.startswith("raw.")}
    effective = {block: arrays.get(f"effective.{block}", values) for block, values in raw.items()}
    pc_blocks = tuple(about["pc_blocks"])
    return Spectra(about["name"], about["step"], pc_blocks, raw, effective, about.get("checkpoint", ""))


def of_sources(sources: Sequence[Path], output: Path) -> list[Spectra]:
    """Spectra of run folders (their last checkpoints), checkpoint folders or stored .npz files, with unique names.

    One that is given twice is read once. A name is as much of the run's path as is needed, and the step where a run is
    given with several.
    """
    found = [_of_source(source, output) for source in dict.fromkeys(sources)]
    runs = [_run_of(Path(item.checkpoint)) if item.checkpoint else Path(item.name) for item in found]
    different = list(dict.fromkeys(runs))
    names = dict(zip(different, unique_names(different), strict=True))
    return [
        replace(item, name=names[run] if runs.count(run) == 1 else f"{names[run]}/step-{item.step}")
        for item, run in zip(found, runs, strict=True)
    ]


def _of_source(source: Path, output: Path) -> Spectra:
    """Computed values are saved in `output` and read from there the next time."""
    if source.suffix == ".npz":
        return load(source)
    checkpoint = source if (source / INDEX).exists() else newest_checkpoint(source)
    if checkpoint is None:
        raise UserError(
            f"{source}: no run with a complete checkpoint (its config needs [checkpoint] enable = true), folder step-N "
            "or .npz file"
        )
    checkpoint = checkpoint.resolve()
    stored = _file_of(checkpoint, output)
    if stored.exists() and stored.stat().st_mtime > (checkpoint / INDEX).stat().st_mtime:
        return load(stored)
    spectra = compute(checkpoint, _run_of(checkpoint).name)
    save(spectra, stored)
    return spectra


def _file_of(checkpoint: Path, output: Path) -> Path:
    """RUN-step-N-HASH.npz; the hash of the path tells runs in folders of one name apart."""
    path_hash = hashlib.sha256(str(checkpoint).encode()).hexdigest()[:8]
    return output / f"{_run_of(checkpoint).name}-{checkpoint.name}-{path_hash}.npz"


def _run_of(checkpoint: Path) -> Path:
    """The run's folder of RUN/checkpoint/step-N; the folder above any other."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoint" else checkpoint.parent


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

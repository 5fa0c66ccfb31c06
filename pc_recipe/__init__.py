"""The training recipe on TorchTitan: it runs from the checkout, on top of the library `pc`.

files/        a run's folder, records, logs, locks; atomic writes
pages/        Markdown tables, the style of plots
config/       every key, the chain of TOML files, rules; without torch
data/         text to tokens to batches
checkpoints/  a checkpoint's folder, and what its weights belong to
train/        the TorchTitan plug-in: model, trainer, diagnostics
evaluate/     export, scores, generation
plan/         a run before it starts: mistakes, memory, cost
runs/         start a run here or under SLURM; many runs from one TOML
report/       curves, spectra, figures

Each imports only those above it, and `pc`.
"""

from importlib.util import find_spec

for _module in ("pydantic", "torchtitan", "pyarrow", "lm_eval", "matplotlib"):
    if find_spec(_module) is None:
        raise ImportError(f"{_module} is not installed; in the checkout: pip install --editable '.[recipe]'")

"""Polynomial weight preconditioning: linear layers that multiply by PC(W).

The modules at this level need only torch and work in any training loop:

    model = pc.attach(model, pc.PCConfig(level=4))
    optimizer = torch.optim.AdamW(model.parameters())  # ... train as before
    model = pc.merge(model)

The subpackages are the training recipe and need the project's extras: `pc.titan` trains with PC on TorchTitan,
`pc.data` writes token shards, `pc.plan` estimates the cost of a config, `pc.launch` and `pc.sweep` start runs,
`pc.evaluate` and `pc.analysis` evaluate and plot them, `pc.common` holds shared helpers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pc import polynomial, spectral
from pc.attach import attach, merge
from pc.config import PCConfig
from pc.errors import UserError
from pc.forward import refresh
from pc.linear import PCLinear, effective_weight, named_pc_linears

if TYPE_CHECKING:
    from pc.muon import Muon
    from pc.start import preserve
    from pc.step import StepSchedule

__version__ = "0.1.0"

__all__ = [
    "Muon",
    "PCConfig",
    "PCLinear",
    "StepSchedule",
    "UserError",
    "attach",
    "effective_weight",
    "merge",
    "named_pc_linears",
    "polynomial",
    "preserve",
    "refresh",
    "spectral",
]

_IMPORTED_WHEN_USED = {"Muon": "pc.muon", "preserve": "pc.start", "StepSchedule": "pc.step"}


def __getattr__(name: str):
    # They import torch.distributed.tensor, which takes half as long to import as torch itself.
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module 'pc' has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)

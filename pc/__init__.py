"""Polynomial weight preconditioning: linear layers whose weight is PC(W).

The modules at this level need torch alone and work in any training loop:

    model = pc.attach(model, pc.PCConfig(level=4))
    optimizer = torch.optim.AdamW(model.parameters())  # ... train as before
    model = pc.merge(model)

The packages beside them are the recipe, and need the project's extras: `pc.titan` trains with PC on TorchTitan, `pc.data`
makes token shards, `pc.plan` says what a config needs, `pc.launch` and `pc.sweep` start runs, `pc.evaluate` and
`pc.analysis` look at what came of them; `pc.common` serves them all.
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
    # They need torch.distributed.tensor, which takes half as long to import as torch itself.
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module 'pc' has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)

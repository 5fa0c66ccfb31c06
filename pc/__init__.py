"""Polynomial weight preconditioning: linear layers whose weight is PC(W).

The modules at this level need torch alone and work in any training loop:

    model = pc.attach(model, pc.PCConfig(level=4))
    optimizer = torch.optim.AdamW(model.parameters())  # ... train as before
    model = pc.merge(model)

`pc.titan` trains with them on TorchTitan; `pc.data`, `pc.evaluate`, `pc.analysis` and `pc.launch` are the
recipe around it.
"""

from pc import polynomial, spectral
from pc.attach import attach, merge
from pc.config import PCConfig
from pc.errors import UserError
from pc.forward import refresh
from pc.linear import PCLinear, effective_weight, named_pc_linears
from pc.muon import Muon
from pc.step import StepSchedule

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
    "refresh",
    "spectral",
]

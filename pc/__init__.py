"""Polynomial weight preconditioning: models that multiply by PC(W) instead of W.

The modules at this level need only torch and work in any training loop:

    model = pc.attach(model, pc.PCConfig(level=4))
    optimizer = torch.optim.AdamW(model.parameters())
    preconditioner = pc.precondition(model, optimizer)
    ...                                    # train as before, with preconditioner.pull_back() before clipping
    model = pc.merge(model)

`weight` holds PC(W) and `weight_orig` holds W, much like the master weights of mixed-precision training. The
modules, in the order of their imports:

    errors                            what a user can fix; without torch
    maps, blocks, config              what a user configures: levels and their maps, layers, `PCConfig`; without torch
    half, polynomial, spectral        products with float16 factors, polynomials of matrices, singular values
    method.py                         PC(W) of one matrix and its gradient; power iteration
    shards, assignment, owner         functions of whole matrices on sharded weights, each on one rank
    splits, inverse                   a stored weight as matrices; W of which a given weight is PC(W)
    weight                            a weight, with W, gamma, u and v beside it
    guard, step, watch                a step's two passes, and when they run: read the docstring of `step` first
    model_classes, targets            how the weights of known models are split, and which weights get PC
    skeleton                          the same of a checkpoint's names and shapes, without its model
    layer                             the paper's layer, with PC(W) in its autograd graph: the readable reference
    optim/                            Muon on owner ranks; AdamH and MuonH, which keep the norms of weights
    followed, preconditioner          W in the optimizers' parameter groups; what `precondition` returns
    api                               attach, precondition, preserve, merge, detach
    matrices, measure                 all matrices of a model, and how well they are conditioned
    command                           how commands print and end
    report/                           the same for any checkpoint, as tables and a page: `python -m pc.report MODEL`
    integrations/                     PC in the trainers of Hugging Face, Lightning and TorchTitan

The training recipe is the package `pc_recipe` beside this one.
"""

# ruff: noqa: F401, the names below TYPE_CHECKING are exports

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pc import owner, polynomial, spectral
    from pc.api import attach, detach, merge, plain_state_dict, precondition, preserve
    from pc.config import MatrixSplit, PCConfig
    from pc.errors import UserError
    from pc.layer import PCLinear, effective_weight
    from pc.measure import conditioning
    from pc.optim.hyperball import AdamH, MuonH
    from pc.optim.muon import Muon
    from pc.targets import describe
    from pc.weight import named_weights

__version__ = "0.1.0"

# Imported when first used, so that the parts of the recipe that only read configs do not import torch.
_NAMES = {
    "api": ["attach", "detach", "merge", "plain_state_dict", "precondition", "preserve"],
    "config": ["MatrixSplit", "PCConfig"],
    "errors": ["UserError"],
    "layer": ["PCLinear", "effective_weight"],
    "measure": ["conditioning"],
    "optim.hyperball": ["AdamH", "MuonH"],
    "optim.muon": ["Muon"],
    "targets": ["describe"],
    "weight": ["named_weights"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("owner", "polynomial", "spectral")
__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"pc.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'pc' has no attribute {name!r}")
    return getattr(import_module(f"pc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

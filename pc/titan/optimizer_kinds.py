# No `from __future__ import annotations` here: TorchTitan needs the fields' real types to merge these classes.
"""The optimizers that `optimizer.name` can choose for the hidden matrices. To add one, add an entry to `KINDS`."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torchtitan.config import job_config as titan

from pc.muon import Muon


@dataclass
class Optimizer(titan.Optimizer):
    """TorchTitan's section plus Muon. AdamW's keys also apply to the parameters that Muon does not train."""

    name: str = "AdamW"
    """Optimizer of the hidden matrices, "AdamW" or "Muon"; AdamW trains all other parameters."""

    muon_momentum: float = 0.95
    """Muon's momentum."""

    muon_nesterov: bool = True
    """Nesterov momentum in Muon."""

    muon_steps: int = 5
    """Newton-Schulz steps."""

    muon_adjust_lr: str = "match_rms_adamw"
    """How Muon scales the learning rate with the matrix shape: "match_rms_adamw" or "original"."""


@dataclass(frozen=True)
class Kind:
    """What the trainer needs to know about an optimizer. Its own keys begin with its name: "muon_" for "Muon"."""

    build: Callable[[list[nn.Parameter], Optimizer], torch.optim.Optimizer]
    states: int
    """state tensors per parameter and of its size, for the memory estimate"""
    obeys_found_inf: Callable[[torch.optim.Optimizer], bool]
    """whether its step changes nothing if `found_inf` is 1 on the device, without waiting for the device"""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """{key: (minimum, maximum)} of its own numbers (`pc.titan.ranges`)"""
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """{key: valid values} of its own strings"""


def _adamw(parameters: list[nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def _muon(parameters: list[nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    return Muon(
        parameters,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        ns_steps=config.muon_steps,
        adjust_lr_fn=config.muon_adjust_lr,
    )


KINDS: dict[str, Kind] = {
    "AdamW": Kind(_adamw, states=2, obeys_found_inf=lambda optimizer: bool(optimizer.defaults.get("fused"))),
    "Muon": Kind(
        _muon,
        states=1,
        obeys_found_inf=lambda _: True,
        ranges={"muon_momentum": (0, 0.999999), "muon_steps": (1, 100)},
        choices={"muon_adjust_lr": ("match_rms_adamw", "original")},
    ),
}
"""{optimizer.name: Kind}; the lower-case names are those of the optimizer states in a checkpoint."""


def foreign_keys(name: str) -> list[str]:
    """The keys of the section that only optimizers other than `name` read."""
    others = tuple(f"{kind.lower()}_" for kind in KINDS if kind != name)
    return [key for key in vars(Optimizer()) if key.startswith(others)]

# No `from __future__ import annotations` here: TorchTitan merges these classes by their fields' real types.
"""The optimizers that `optimizer.name` can choose for the hidden matrices. Another one is an entry in `KINDS`."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torchtitan.config import job_config as titan

from pc.muon import NEWTON_SCHULZ_COEFFICIENTS, Muon


@dataclass
class Optimizer(titan.Optimizer):
    """TorchTitan's section, with Muon. AdamW's keys also serve what another optimizer does not train."""

    name: str = "AdamW"
    """What trains the hidden matrices, "AdamW" or "Muon"; AdamW trains the rest."""

    muon_momentum: float = 0.95
    """Momentum of Muon."""

    muon_nesterov: bool = True
    """Nesterov momentum in Muon."""

    muon_steps: int = 5
    """Newton-Schulz steps."""

    muon_coefficients: str = "jordan2024"
    """Newton-Schulz coefficients, by their name in `pc.muon.NEWTON_SCHULZ_COEFFICIENTS`."""

    muon_adjust_lr: str = "match_rms_adamw"
    """How Muon scales the learning rate with a matrix's shape, "match_rms_adamw" or "original"."""


@dataclass(frozen=True)
class Kind:
    """What the trainer needs to know of an optimizer. Its own keys begin with its name: "muon_" for "Muon"."""

    build: Callable[[list[nn.Parameter], Optimizer], torch.optim.Optimizer]
    states: int
    """tensors as large as a parameter that it keeps, for the memory estimate"""
    obeys_found_inf: Callable[[torch.optim.Optimizer], bool]
    """whether its step leaves the weights alone where `found_inf` is 1 on the device, so that nothing waits for it"""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """{key: least and most} of its own numbers (`pc.titan.ranges`)"""
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """{key: what it may be} of its own words"""


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
        ns_coefficients=NEWTON_SCHULZ_COEFFICIENTS[config.muon_coefficients],
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
        choices={
            "muon_coefficients": tuple(NEWTON_SCHULZ_COEFFICIENTS),
            "muon_adjust_lr": ("match_rms_adamw", "original"),
        },
    ),
}
"""By `optimizer.name`; in lower case, the names of their states in a checkpoint."""


def foreign_keys(name: str) -> list[str]:
    """The keys of the section that only other optimizers than `name` read."""
    others = tuple(f"{kind.lower()}_" for kind in KINDS if kind != name)
    return [key for key in vars(Optimizer()) if key.startswith(others)]

"""The optimizers that `optimizer.name` can choose for the hidden matrices. To add one, add an entry to `KINDS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pc_recipe.config.sections import RESULT, RUN, Beta, BlockFactors, Factor, Fraction, Section, key, one_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Kind:
    """What the trainer needs to know about an optimizer."""

    build: "Callable[[list[dict], OptimizerSection], torch.optim.Optimizer]"
    """Makes the optimizer from parameter groups, which have their own rate and decay; imports torch when called."""
    states: int
    """State tensors per parameter, each of its size, for the memory estimate."""
    keeps_norms: bool = False
    """Whether it keeps the weights' norms. Its rate is then `hyperball_lr`, and it has no decay, which only controls norms."""
    splits_heads: bool = False
    """Whether a parameter group may treat each attention head as a matrix (`muon_heads`)."""
    own_keys: tuple[str, ...] = ()
    """Beginnings of the keys that only such optimizers read."""

    def lr(self, config: "OptimizerSection") -> float:
        """Its peak learning rate."""
        return config.hyperball_lr if self.keeps_norms else config.lr


def _adamw(parameters: "list[dict]", config: "OptimizerSection") -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(parameters, **_of_adam(config))


def _adamh(parameters: "list[dict]", config: "OptimizerSection") -> "torch.optim.Optimizer":
    from pc.optim.hyperball import AdamH

    return AdamH(parameters, **_of_adam(config))


def _muon(parameters: "list[dict]", config: "OptimizerSection") -> "torch.optim.Optimizer":
    from pc.optim.muon import Muon

    return Muon(parameters, **_of_muon(config))


def _muonh(parameters: "list[dict]", config: "OptimizerSection") -> "torch.optim.Optimizer":
    from pc.optim.hyperball import MuonH

    return MuonH(parameters, **_of_muon(config))


def _of_adam(config: "OptimizerSection") -> dict[str, Any]:
    return {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }


def _of_muon(config: "OptimizerSection") -> dict[str, Any]:
    return {
        "momentum": config.muon_momentum,
        "nesterov": True,
        "ns_steps": 5,
        "adjust_lr_fn": "match_rms_adamw",  # the paper's; torch's default is another
    }


KINDS: dict[str, Kind] = {
    "AdamW": Kind(_adamw, states=2),
    "Muon": Kind(_muon, states=1, splits_heads=True, own_keys=("muon_",)),
    "AdamH": Kind(_adamh, states=2, keeps_norms=True, own_keys=("hyperball_lr",)),
    "MuonH": Kind(_muonh, states=1, keeps_norms=True, splits_heads=True, own_keys=("muon_", "hyperball_lr")),
}
"""{optimizer.name: Kind}; in lower case, these are the names of the optimizer states in a checkpoint."""


class OptimizerSection(Section):
    """AdamW's keys also apply to parameters that the other optimizers do not train, and to AdamH; Muon's also to MuonH."""

    decides = RESULT
    name: Annotated[str, one_of(KINDS)] = key(
        "AdamW", f"Optimizer of the hidden matrices: {', '.join(KINDS)}. AdamW trains all other parameters."
    )
    lr: Factor = key(8e-4, "Peak learning rate; AdamH and MuonH use `hyperball_lr`.")
    beta1: Beta = key(0.9, "AdamW's decay of the gradient's mean.")
    beta2: Beta = key(0.95, "AdamW's decay of the squared gradient's mean.")
    eps: Fraction = key(1e-8, "AdamW's epsilon.")
    weight_decay: Factor = key(0.1, "Decoupled weight decay, times the learning rate; AdamH and MuonH have none.")
    independent_decay: bool = key(
        False, "weight_decay is the share of a weight that a step at the peak removes, whatever the learning rate."
    )
    lr_factors: BlockFactors = key({}, "Factors of the learning rate of some blocks, such as {o = 1.6, ffn = 1.8}.")
    implementation: Literal["for-loop", "foreach", "fused"] = key("fused", "Implementation of torch's AdamW.", RUN)
    muon_momentum: Beta = key(0.95, "Muon's momentum.")
    muon_heads: list[Literal["q", "k", "v"]] = key([], "Blocks in which Muon treats each attention head as a matrix.")
    hyperball_lr: Factor = key(0.02, "Peak length of a step of AdamH and MuonH, relative to the weight's norm.")

    def list_unread(self) -> list[str]:
        """Keys that are set, but that only other optimizers read."""
        own = KINDS[self.name].own_keys
        of_others = tuple(key for kind in KINDS.values() for key in kind.own_keys if key not in own)
        return sorted(name for name in self.model_fields_set if name.startswith(of_others))

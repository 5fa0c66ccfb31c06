"""PC(W), and the linear layer of mode "forward" that multiplies by it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pc.config import PCConfig
from pc.methods import method_of
from pc.methods.base import Method
from pc.spectral import without_autocast


def effective_weight(weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor, config: PCConfig) -> Tensor:
    """PC(W) by the method that the config names (paper, algorithm 1, line 6: `pc.methods.normalised_polynomial`).

    This is the reference that faster code is tested against. The backward pass treats `u` and `v` as constants;
    for the paper's method gradient flows through the divisor `s`, but not through the factor `s.detach()`.

    Args:
        weight: W, [..., n, m]; leading dimensions are independent matrices.
        gamma: learnable scalars [..., 1], or of each row [..., n] (`Method.count_gammas`), or None for 1.
        u: left singular vector estimates [..., n].
        v: right singular vector estimates [..., m].
        config: with one `level` (see `PCConfig.for_block`).

    Returns:
        [..., n, m] in the dtype of `weight`.
    """
    return _evaluate(method_of(config), weight, gamma, u, v)


def _evaluate(method: Method, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
    with without_autocast(weight):
        return method.apply(weight, gamma, u.detach().to(weight.dtype), v.detach().to(weight.dtype))


class PCLinear(nn.Linear):
    """A linear layer that multiplies by PC(W), computed in every forward pass, inside the autograd graph.

    `weight` keeps its name and shape and holds W, so initialisation, sharding and conversion treat the layer as any
    other. The layer adds the parameter `gamma` (unless `learnable_gamma` is off) and the buffers `u`
    [out_features] and `v` [in_features]. Between optimizer steps these are constant; after a step `refresh` updates
    them.
    The preconditioner of an attached model calls it; in a loop of your own with layers made by hand, call it yourself.

    Args:
        config: with one level.
        name: the layer's full name in the model, which seeds `u` and `v`.
        others: arguments of `nn.Linear`.
    """

    gamma: nn.Parameter | None
    # u and v are None while the weight is on the meta device, until `start_pc` or until a state is loaded
    u: Any
    v: Any
    pc_method: Method
    pc_name: str
    pc_plain_class: Any

    def __init__(self, in_features: int, out_features: int, config: PCConfig, name: str = "", **others) -> None:
        super().__init__(in_features, out_features, **others)
        add_pc(self, name, config)

    def remove_pc(self) -> None:
        """Turn the layer into what it was."""
        self.__class__ = self.pc_plain_class
        for key in ("gamma", "u", "v", "pc_name", "pc_method", "pc_plain_class"):
            delattr(self, key)

    @torch.no_grad()
    def start_pc(self) -> None:
        """In a new layer, set gamma to 1, and `u`, `v` to the vectors that its method starts with."""
        if self.u is not None:
            return
        weight = self.weight
        self.u, self.v = (
            x.to(weight.device, weight.dtype) for x in self.pc_method.initial_vectors(self.pc_name, weight.shape)
        )
        if self.gamma is not None:
            if self.gamma.is_meta:  # plain weights were assigned to a layer on the meta device
                self.gamma = nn.Parameter(torch.empty_like(self.gamma, device=weight.device))
            self.gamma.fill_(1.0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update `u` and `v` by `power_iterations` power iterations, from random ones in a new layer."""
        self.start_pc()
        weight = self.weight
        if hasattr(weight, "full_tensor"):  # a DTensor, a class that is slow to import
            weight = weight.full_tensor()  # on every rank: this mode is the simple reference, not the fast one
        with without_autocast(weight):
            u, v = self.pc_method.advance(weight.to(self.u.dtype), self.u, self.v)
        self.u.copy_(u)
        self.v.copy_(v)

    def effective_weight(self) -> Tensor:
        """PC(W), [out_features, in_features]."""
        return _evaluate(self.pc_method, self.weight, self.gamma, self.u, self.v)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return F.linear(x, self.effective_weight(), self.bias)

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        if self.u is None and prefix + "u" in state_dict:
            self.u, self.v = (torch.empty_like(state_dict[prefix + k], device=self.weight.device) for k in "uv")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "u" not in state_dict and prefix + "weight" in state_dict and not self.weight.is_meta:
            # a plain layer's state, without u and v
            if self.u is not None and not self.pc_method.uses_vectors:
                self.u.zero_()  # a constant of the weights before
            self.refresh()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, PC({self.pc_method.describe()})"


def add_pc(linear: nn.Linear, name: str, config: PCConfig) -> None:
    """Turn an `nn.Linear` into a `PCLinear`, in place."""
    layer: Any = linear
    layer.pc_plain_class = type(linear)
    layer.__class__ = PCLinear
    layer.pc_name, layer.pc_method = name, method_of(config)
    number = layer.pc_method.count_gammas(linear.out_features)
    layer.register_parameter("gamma", nn.Parameter(linear.weight.new_ones(number)) if config.learnable_gamma else None)
    layer.register_buffer("u", None)
    layer.register_buffer("v", None)
    if not linear.weight.is_meta:
        layer.start_pc()

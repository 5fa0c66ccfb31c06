"""PC(W), and the paper's layer, which computes it in every forward pass, inside the autograd graph. This is the readable
reference that tests compare with; `pc.precondition` computes the same once per optimizer step."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pc.config import PCConfig
from pc.errors import UserError
from pc.method import Method, matmuls, method_of
from pc.spectral import initial_vectors
from pc.targets import find


def effective_weight(weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor, config: PCConfig) -> Tensor:
    """PC(W) (paper, algorithm 1, line 6: `pc.method`).

    The backward pass treats `u` and `v` as constants; gradient flows through the divisor `s`, but not through the factor
    `s.detach()`.

    Args:
        weight: W, [..., n, m]; leading dimensions are independent matrices.
        gamma: learnable scalars [..., 1], or None for 1.
        u: left singular vector estimates [..., n].
        v: right singular vector estimates [..., m].
        config: with one `level` (see `PCConfig.for_block`).

    Returns:
        [..., n, m] in the dtype of `weight`.
    """
    return _evaluate(method_of(config), weight, gamma, u, v)


def _evaluate(method: Method, weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
    with matmuls(weight, None):
        return method.apply(weight, gamma, u.detach().to(weight.dtype), v.detach().to(weight.dtype))


class PCLinear(nn.Linear):
    """A linear layer that multiplies by PC(W), computed in every forward pass, inside the autograd graph.

    `weight` holds W, so initialisation and sharding treat the layer as any other. It adds the parameter `gamma` (unless
    `learnable_gamma` is off) and the buffers `u` [out_features] and `v` [in_features], which are constant between optimizer
    steps: call `refresh` before the first forward pass and after every step (paper, algorithm 3).

    Args:
        in_features: m.
        out_features: n.
        config: with one level.
        name: the layer's full name in the model, which seeds `u` and `v`.
        others: arguments of `nn.Linear`.
    """

    gamma: nn.Parameter | None
    u: Any
    v: Any

    def __init__(self, in_features: int, out_features: int, config: PCConfig, name: str = "", **others) -> None:
        super().__init__(in_features, out_features, **others)
        self.pc_name, self.pc_method = name, method_of(config)
        self.gamma = nn.Parameter(self.weight.new_ones(1)) if config.learnable_gamma else None
        self.register_buffer("u", self.weight.new_empty(out_features))
        self.register_buffer("v", self.weight.new_empty(in_features))
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Set gamma to 1, and u and v to the vectors that the method starts with; call it after `to_empty`."""
        if self.gamma is not None:
            self.gamma.fill_(1.0)
        if not self.u.is_meta:
            for own, first in zip((self.u, self.v), initial_vectors(self.pc_name, self.weight.shape)):
                own.copy_(first)

    @torch.no_grad()
    def refresh(self) -> None:
        """Update `u` and `v` by `power_iterations` power iterations."""
        weight = self.weight
        if hasattr(weight, "full_tensor"):  # of a DTensor
            weight = weight.full_tensor()  # on every rank: this is the simple reference, not the fast way
        with matmuls(weight, None):
            u, v, _ = self.pc_method.advance(weight.to(self.u.dtype), self.u, self.v)
        self.u.copy_(u)
        self.v.copy_(v)

    def effective_weight(self) -> Tensor:
        """PC(W), [out_features, in_features]."""
        return _evaluate(self.pc_method, self.weight, self.gamma, self.u, self.v)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return F.linear(x, self.effective_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, PC({self.pc_method.describe()})"


def put_in_graph(model: nn.Module, config: PCConfig) -> dict[str, PCLinear]:
    """Replace the linear layers that the config names by `PCLinear` layers with the same weights, in place, for
    tests and measurements.

    Returns:
        the new layers by name; `refresh` each after every optimizer step.

    Raises:
        UserError: a weight that is not one matrix of an `nn.Linear`.
    """
    targets, _ = find(model, config)
    layers = {}
    for target in targets.values():
        linear = target.module
        if type(linear) is not nn.Linear or [part.count for part in target.split.parts] != [1]:
            raise UserError(f"{target.name} is a {type(linear).__name__}; a PCLinear is one matrix of an nn.Linear")
        size = linear.in_features, linear.out_features, target.config, target.name
        layer = PCLinear(*size, bias=False, device=linear.weight.device, dtype=linear.weight.dtype)
        layer.weight, layer.bias = linear.weight, linear.bias
        model.set_submodule(target.name, layer)
        if not layer.weight.is_meta:
            layer.refresh()
        layers[target.name] = layer
    return layers

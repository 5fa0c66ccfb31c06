"""PC(W), and the linear layer that multiplies by it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pc import polynomial
from pc.config import Cut, PCConfig
from pc.cuts import Form, form_of
from pc.spectral import power_iteration, spectral_norm_estimate, without_autocast


def effective_weight(weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor, config: PCConfig) -> Tensor:
    """PC(W) = gamma * [s] * g(W / s) with s = u^T W v + epsilon (paper, algorithm 1, line 6).

    This is the reference that faster code is tested against. The backward pass treats `u` and `v` as constants;
    gradient flows through the divisor `s`, but not through the recovery factor `[s]`.

    Args:
        weight: W, [..., n, m]; leading dimensions are independent matrices.
        gamma: learnable scalars [..., 1], or None for 1.
        u: left singular vector estimates [..., n].
        v: right singular vector estimates [..., m].
        config: with one `level` (see `PCConfig.for_block`).

    Returns:
        [..., n, m] in the dtype of `weight`.
    """
    with without_autocast(weight):
        s = spectral_norm_estimate(weight, u.detach().to(weight.dtype), v.detach().to(weight.dtype))[..., None, None]
        normalised = weight / s
        if config.compute_dtype == "bfloat16":
            normalised = normalised.bfloat16()
        result = polynomial.apply(config.map, normalised).to(weight.dtype)
    scale = s.detach() if config.norm_recovery else None
    if gamma is not None:
        gamma = gamma.to(weight.dtype)[..., None]
        scale = gamma if scale is None else scale * gamma
    return result if scale is None else result * scale


def evaluate(form: Form, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """PC(W) of weights that are one matrix or several.

    Args:
        form: of each weight.
        weight: W of a batch of weights, [B, ...] as stored.
        rest: their gammas if learnable, u and v, with the shapes of `Form`.

    Returns:
        [B, ...] as stored.
    """

    def of_matrices(config: PCConfig, weight: Tensor, *rest: Tensor) -> tuple[Tensor]:
        *gammas, u, v = rest
        return (effective_weight(weight, gammas[0] if gammas else None, u, v, config),)

    return form.apply(of_matrices, form.kinds, (weight, *rest), "w")


class PCLinear(nn.Linear):
    """A linear layer that multiplies by PC(W), computed in every forward pass, inside the autograd graph.

    `weight` keeps its name and shape and holds W, so initialisation, sharding and conversion treat the layer as any
    other. The layer adds the parameter `gamma` [matrices] (unless `learnable_gamma` is off) and the buffers `u`
    [out_features] and `v` [in_features]. Between optimizer steps they are constant; `refresh` updates them after a step
    (`pc.schedule` calls it).

    Args:
        config: with one level.
        name: the layer's full name in the model, which seeds `u` and `v`.
        others: arguments of `nn.Linear`.
    """

    gamma: nn.Parameter | None
    u: Tensor
    v: Tensor
    pc_form: Form
    pc_name: str

    pc_is_initialised: bool
    """False on the meta device and after `to_empty`, until `reset_pc` or until a state is loaded."""

    def __init__(self, in_features: int, out_features: int, config: PCConfig, name: str = "", **others) -> None:
        super().__init__(in_features, out_features, **others)
        self.add_pc(name, form_of(name, self.weight.shape, Cut(), [config], [0]))

    def add_pc(self, name: str, form: Form) -> None:
        """Turn an `nn.Linear` that has its weight into a PC layer."""
        self.pc_plain_class, self.__class__ = type(self), PCLinear
        self.pc_name, self.pc_form = name, form
        gamma = nn.Parameter(self.weight.new_empty(form.shape_of("g"))) if "g" in form.kinds else None
        self.register_parameter("gamma", gamma)
        for kind in "uv":
            self.register_buffer(kind, self.weight.detach().new_empty(form.shape_of(kind)))
        self.pc_is_initialised = False
        if not self.weight.is_meta:
            self.reset_pc()

    def remove_pc(self) -> None:
        """Turn the layer into what it was."""
        self.__class__ = self.pc_plain_class
        for key in ("gamma", "u", "v", "pc_name", "pc_form", "pc_plain_class", "pc_is_initialised"):
            delattr(self, key)

    @torch.no_grad()
    def reset_pc(self) -> None:
        """Set gamma to 1, and `u`, `v` to random vectors seeded by the layer's name."""
        if self.u.is_meta:  # plain weights were assigned to a layer on the meta device
            self.u, self.v = (x.new_empty(x.shape, device=self.weight.device) for x in (self.u, self.v))
            if self.gamma is not None:
                self.gamma = nn.Parameter(self.gamma.new_empty(self.gamma.shape, device=self.weight.device))
        if self.gamma is not None:
            self.gamma.fill_(1.0)
        for buffer, vector in zip((self.u, self.v), self.pc_form.initial_vectors(self.pc_name), strict=True):
            buffer.copy_(vector)
        self.pc_is_initialised = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Update `u` and `v` by `power_iterations` power iterations, from random ones in a new layer."""
        if not self.pc_is_initialised:
            self.reset_pc()
        weight = self.weight
        if hasattr(weight, "full_tensor"):  # a DTensor, a class that is slow to import
            weight = weight.full_tensor()  # on every rank: this schedule is the simple reference, not the fast one

        def iterate(config: PCConfig, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return power_iteration(weight, u, v, config.power_iterations)

        with without_autocast(weight):
            found = self.pc_form.apply(
                iterate, "wuv", [t[None] for t in (weight.to(self.u.dtype), self.u, self.v)], "uv"
            )
        for buffer, vector in zip((self.u, self.v), found, strict=True):
            buffer.copy_(vector[0])

    def effective_weight(self) -> Tensor:
        """PC(W), [out_features, in_features]."""
        gammas = [] if self.gamma is None else [self.gamma]
        return evaluate(self.pc_form, *(t[None] for t in (self.weight, *gammas, self.u, self.v)))[0][0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return F.linear(x, self.effective_weight(), self.bias)

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "u" in state_dict:
            self.pc_is_initialised = True
        elif prefix + "weight" in state_dict and not self.weight.is_meta:  # plain weights
            self.refresh()

    def extra_repr(self) -> str:
        config = self.pc_form.chosen[0].config
        return f"{super().extra_repr()}, level={config.level}, schedule={config.schedule}"

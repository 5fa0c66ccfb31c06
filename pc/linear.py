"""PC(W), and the linear layer that uses it."""

from collections.abc import Iterator
from copy import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pc import polynomial
from pc.config import BLOCK_SUFFIXES, PCConfig
from pc.errors import UserError
from pc.spectral import initial_vectors, spectral_norm_estimate

# What wrappers of torch insert into module names.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def effective_weight(weight: Tensor, gamma: Tensor | None, u: Tensor, v: Tensor, config: PCConfig) -> Tensor:
    """PC(W) = gamma * [s] * g(W / s) with s = u^T W v + epsilon (paper, algorithm 1, line 6).

    The one definition that everything else is tested against. `u` and `v` are constants of the backward
    pass; gradient flows through the `s` that divides, and not through the recovery factor `[s]`.

    Args:
        weight: W, [..., n, m]; leading dimensions are independent matrices.
        gamma: learnable scalars [..., 1], or None for 1.
        u: left singular vector estimates [..., n].
        v: right singular vector estimates [..., m].
        config: with one `level` (see `PCConfig.for_block`).

    Returns:
        [..., n, m] in the dtype of `weight`.
    """
    s = spectral_norm_estimate(weight, u.detach().to(weight.dtype), v.detach().to(weight.dtype))[..., None, None]
    normalised = weight / s
    if config.compute_dtype == "bfloat16":
        normalised = normalised.bfloat16()
    result = polynomial.apply(polynomial.resolve(config.level), normalised).to(weight.dtype)
    scale = None
    if config.norm_recovery:
        scale = s.detach()
    if gamma is not None:
        gamma = gamma.to(weight.dtype)[..., None]
        scale = gamma if scale is None else scale * gamma
    return result if scale is None else result * scale


class PCLinear(nn.Linear):
    """A linear layer whose effective weight is PC(W).

    `weight` keeps its name and shape [out_features, in_features], so initialisation, sharding and
    conversion treat the layer as any other. Added are the parameter `gamma` [1] (unless
    `learnable_gamma` is off) and, in schedule "forward", the buffers `u` [out_features] and `v` [in_features].

    In schedule "forward" `weight` is the raw W and PC(W) is part of the graph. In schedule "step"
    `weight` is PC(W) between optimizer steps; `pc.StepSchedule` keeps the raw W and puts both in place.
    Then gamma is left out of the state dict as well, so that it is a plain linear's.
    """

    def __init__(self, *args, name: str, config: PCConfig, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._add_pc(name, config)

    @classmethod
    def from_linear(cls, linear: nn.Linear, name: str, config: PCConfig) -> "PCLinear":
        """The same layer with PC: parameters are shared with `linear`, not copied; its hooks come along.

        Args:
            linear: an `nn.Linear`. A subclass that multiplies in its own way (in float8, say) goes on doing so, which
                is possible in schedule "step" alone, where `weight` is PC(W).
            name: the layer's full name in the model, from which `u` and `v` are drawn.
            config: with one level.

        Raises:
            UserError: a subclass with its own `forward` in schedule "forward".
        """
        kind = type(linear)
        if config.schedule == "forward" and kind.forward is not nn.Linear.forward:
            raise UserError(f'pc.schedule = "forward" would replace how {kind.__name__} {name} multiplies; use "step"')
        layer_class = cls if kind is nn.Linear else _with_product_of(kind)
        layer = layer_class.__new__(layer_class)
        # Tensor parallelism lives in hooks, which must not be left behind. Containers are the layer's own.
        layer.__dict__ = {key: copy(value) if isinstance(value, dict) else value for key, value in vars(linear).items()}
        layer._add_pc(name, config)
        return layer

    def _add_pc(self, name: str, config: PCConfig) -> None:
        self.name, self.pc_config = name, config
        # TorchTitan checkpoints keep PC's own tensors apart from the model's in either schedule.
        self.hides_pc_state = config.schedule == "step"
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        if config.learnable_gamma:
            self.gamma = nn.Parameter(torch.empty(1, **like))
        else:
            self.register_parameter("gamma", None)
        if config.schedule == "forward":
            self.register_buffer("u", torch.empty(self.out_features, **like))
            self.register_buffer("v", torch.empty(self.in_features, **like))
        if self.weight.device.type != "meta":
            self.reset_pc_parameters()

    @torch.no_grad()
    def reset_pc_parameters(self) -> None:
        """gamma = 1, and `u`, `v` as drawn from the layer's name. Needed after `to_empty`."""
        if self.gamma is not None:
            self.gamma.fill_(1.0)
        if self.pc_config.schedule == "forward":
            u, v = initial_vectors(self.name, (self.out_features, self.in_features))
            self.u.copy_(u)
            self.v.copy_(v)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.pc_config.schedule == "step":
            return super().forward(x)
        weight = effective_weight(self.weight, self.gamma, self.u, self.v, self.pc_config)
        return F.linear(x, weight, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.hides_pc_state:
            for key in ("gamma", "u", "v"):
                destination.pop(prefix + key, None)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if self.hides_pc_state:
            hidden = {prefix + key for key in ("gamma", "u", "v")}
            missing[:] = [key for key in missing if key not in hidden]

    def extra_repr(self) -> str:
        c = self.pc_config
        return (
            f"{super().extra_repr()}, level={c.level}, schedule={c.schedule}, "
            f"norm_recovery={c.norm_recovery}, learnable_gamma={c.learnable_gamma}"
        )


@cache
def _with_product_of(kind: type[nn.Linear]) -> type[PCLinear]:
    """A PC layer that multiplies as `kind` does."""
    return type(f"PC{kind.__name__}", (PCLinear, kind), {})


def clean_name(name: str) -> str:
    """A module or parameter name without what torch.compile and activation checkpointing insert."""
    for part in _WRAPPER_NAMES:
        name = name.replace(part, "")
    return name


def named_pc_linears(model: nn.Module) -> Iterator[tuple[str, PCLinear]]:
    """Every PC layer with its clean full name, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, PCLinear):
            yield clean_name(name), module


def block_of(name: str) -> str | None:
    """The paper's short name (q, k, v, o, gate, up, down) of a Llama linear layer, None for any other."""
    for block, suffixes in BLOCK_SUFFIXES.items():
        if name.endswith(suffixes):
            return block
    return None

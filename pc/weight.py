"""A weight with PC, and what lies beside it on its module under the names of torch's own `spectral_norm`:

    weight                PC(W): what forward passes multiply by; its gradient is that of PC(W)
    weight_orig           W, a parameter: what the optimizer trains, with the gradient of W
    weight_gamma          a parameter of one dimension, unless `PCConfig.learnable_gamma` is off
    weight_u, weight_v    buffers

W is sharded as `weight` is, u and v over the same ranks (`pc.shards.shard_like`), gamma as `shard_gammas` says.
`pc.precondition` adds them once DDP or FSDP has wrapped the model, so that neither sees them. As `Tensors` they go on to
`pc.step`.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pc.config import PCConfig
from pc.errors import UserError
from pc.shards import local, shard_gammas, shard_like, shards_of, viewed
from pc.splits import WeightSplit

ADDED = ("orig", "gamma", "u", "v")


class Tensors(NamedTuple):
    """A weight's tensors, sharded over the same ranks."""

    effective: nn.Parameter
    """PC(W), as stored: [N, m], [m, N] or a stack of E such"""
    orig: nn.Parameter
    """W, as stored"""
    gamma: nn.Parameter | None
    """[P] for P matrices, [E P] for a stack; None: not learnable"""
    u: Tensor
    """[rows of all P matrices together], of a stack [E, ...]"""
    v: Tensor
    """[P, m], or [m] for P = 1, of a stack [E, ...]"""


class Weight:
    """A weight that `pc.attach` has marked.

    Args:
        name: full name of the module; or of the parameter, if that is not "weight".
        module, attribute: where it is.
        split: how it is cut into matrices.

    Raises:
        UserError: the module has no such parameter any more.
    """

    def __init__(self, name: str, module: nn.Module, attribute: str, split: WeightSplit) -> None:
        self.name, self.module, self.attribute, self.split = name, module, attribute, split
        if module._parameters.get(attribute) is None:
            raise UserError(
                f"{name}: its {attribute} is not a parameter any more; undo what torch's parametrize, prune, spectral_norm or "
                "weight_norm did to it, or leave it out of blocks"
            )
        self._keys = {added: f"{attribute}_{added}" for added in ADDED}
        self.effective: nn.Parameter = module._parameters[attribute]  # type: ignore[assignment]
        """PC(W), the sharded parameter: during a forward pass FSDP puts an unsharded one in its place in the module"""

    @property
    def parameter_name(self) -> str:
        """Of `weight`, in the model."""
        return f"{self.name}.weight" if self.attribute == "weight" else self.name

    @property
    def orig(self) -> Any:
        """W, a parameter in the shape and shards of `weight`; None before `pc.precondition`."""
        return self.module._parameters.get(self._keys["orig"])

    @property
    def gamma(self) -> nn.Parameter | None:
        """[P] for P matrices, [E P] for a stack."""
        return self.module._parameters.get(self._keys["gamma"])

    @property
    def trained(self) -> list[Any]:
        """What an optimizer trains: W, and gamma if it is learnable."""
        parameters = self.module._parameters
        held = (parameters.get(self._keys["orig"]), parameters.get(self._keys["gamma"]))
        return [parameter for parameter in held if parameter is not None]

    @property
    def u(self) -> Any:
        """Left singular vectors, a buffer: [rows of all P matrices together], of a stack [E, ...]."""
        return self.module._buffers.get(self._keys["u"])

    @property
    def v(self) -> Any:
        """Right singular vectors, a buffer: [P, m], or [m] for P = 1, of a stack [E, ...]."""
        return self.module._buffers.get(self._keys["v"])

    def tensors(self) -> Tensors:
        """What its module holds now: `model.double()`, for one, makes new u and v."""
        parameters, buffers, keys = self.module._parameters, self.module._buffers, self._keys
        trained: list[Any] = [parameters[keys["orig"]], parameters.get(keys["gamma"])]
        vectors: list[Any] = [buffers[keys["u"]], buffers[keys["v"]]]
        return Tensors(self.effective, *trained, *vectors)

    @property
    def config(self) -> PCConfig:
        """That of the first part: parts differ in level and entry of `blocks` alone."""
        return self.split.chosen[0].method.config

    @property
    def entries(self) -> set[str]:
        """The entries of `PCConfig.blocks` that name its matrices."""
        return {part.config.blocks[0] for part in self.split.parts if part.config}

    @property
    def added(self) -> list[str]:
        """The names in its module of the tensors beside it."""
        return [key for key in self._keys.values() if key in {**self.module._parameters, **self.module._buffers}]

    def mark(self) -> None:
        """Note on its module that it gets PC: name and split by attribute, which copies and `torch.save` keep."""
        self.module.__dict__.setdefault("pc_weights", {})[self.attribute] = (self.name, self.split)
        self.module.__dict__["extra_repr"] = partial(_extra_repr, self.module)

    @torch.no_grad()
    def start(self) -> None:
        """Take what `weight` holds as W, with gamma 1 and the initial u and v; create these if they do not exist. A frozen
        weight has a frozen W and gamma."""
        effective, module = self.effective, self.module
        vectors = [
            shard_like(effective, x.to(effective.device, effective.dtype))
            for x in self.split.initial_vectors(self.name)
        ]
        if self.orig is not None:
            for old, new in zip((self.orig, self.u, self.v), (effective, *vectors), strict=True):
                local(old).copy_(local(new))
            if self.gamma is not None:
                self.gamma.fill_(1.0)
            return
        orig = nn.Parameter(effective.detach().clone(), effective.requires_grad)
        for name, value in vars(effective).items():  # such as a factor of the rate, which an optimizer reads
            vars(orig).setdefault(name, value)  # a wrapper has its own tensor there
        module.register_parameter(self._keys["orig"], orig)
        if self.config.learnable_gamma:
            gamma = nn.Parameter(_ones(self.split, effective), effective.requires_grad)
            module.register_parameter(self._keys["gamma"], gamma)
        for key, vector in zip("uv", vectors, strict=True):
            module.register_buffer(self._keys[key], vector)

    def remove(self) -> None:
        """Leave a plain module, whose parameter stays as it is."""
        for name in self.added:
            delattr(self.module, name)
        for noted in ("pc_weights", "extra_repr"):
            self.module.__dict__.pop(noted, None)


def _extra_repr(module: nn.Module) -> str:
    """The `extra_repr` of the module's class, and which weights have PC."""
    weights = [f"{weight.attribute}: PC, {weight.split.describe()}" for weight in weights_of(module)]
    return ", ".join([text for text in [type(module).extra_repr(module)] if text] + weights)


def gamma_values(split: WeightSplit, effective: Tensor, gamma: Tensor | None) -> Tensor:
    """Gamma [P] or [E P] without its gradient, in the shape that the split takes, [P] or [E, P]; ones for None."""
    values = _ones(split, effective) if gamma is None else gamma.detach()
    return viewed(values, split.gamma_shape) if split.stack else values


def _ones(split: WeightSplit, effective: Tensor) -> Tensor:
    return shard_gammas(effective, torch.ones(split.gamma_shape, device=effective.device, dtype=effective.dtype))


def versions(weights: Iterable[Weight]) -> list[list[Any]]:
    """For each weight, what changes when PC(W), W, gamma (None if it is not learnable), u or v is written to."""
    found = []
    for weight in weights:
        # a DTensor has two counters: of autograd's operations, and of those on its shard
        tensors: tuple[Any, ...] = weight.tensors()
        (shards,) = shards_of([tensors])
        pairs = zip(tensors, shards, strict=True)
        found.append([None if one is None else (one._version, shard._version) for one, shard in pairs])
    return found


def require_precision(name: str, effective: Tensor) -> None:
    dtype = effective.dtype
    if not dtype.is_floating_point or dtype.itemsize < 4:
        raise UserError(
            f"{name} is {dtype}, but W needs float32 to accumulate small updates; call "
            "model.float(), and use autocast or FSDP's mixed precision for fast matmuls"
        )


def require_in_place(weights: Iterable[Weight], models: Iterable[nn.Module]) -> None:
    """Put sharded parameters back into FSDP's modules, and raise a `UserError` if a weight is not what a module of the models
    multiplies by."""
    modules = {module for model in models for module in model.modules()}
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    for weight in weights:
        if weight.module not in modules:
            raise UserError(f"{weight.name} is not in the model any more: replace or remove layers before pc.attach")
        if weight.module._parameters.get(weight.attribute) is not weight.effective:
            raise UserError(
                f"{weight.name} has another {weight.attribute} than pc.precondition found: call it after DDP and "
                "fully_shard, load without assign=True, and do not use torch's parametrize, prune, spectral_norm or "
                "weight_norm on the same weight"
            )


def weights_of(module: nn.Module) -> Iterator[Weight]:
    """The marked weights of a module itself, not of one inside it."""
    # `vars`, because a wrapper such as peft's also shows the attributes of the module inside it
    for attribute, (name, split) in vars(module).get("pc_weights", {}).items():
        yield Weight(name, module, attribute, split)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Every marked weight with its name, in the model's order."""
    for module in model.modules():
        for weight in weights_of(module):
            yield weight.name, weight


def added_names(model: nn.Module) -> list[str]:
    """The names of the tensors beside the model's weights, under every name of a module that has several."""
    named = model.named_modules(remove_duplicate=False)
    modules = [(f"{name}." if name else "", module) for name, module in named]
    return [prefix + key for prefix, module in modules for weight in weights_of(module) for key in weight.added]

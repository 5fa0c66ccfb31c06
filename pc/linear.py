"""PC(W), and the linear layer that multiplies by it."""

import warnings
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pc import optimizer_hooks, polynomial
from pc.config import BLOCK_SUFFIXES, PCConfig
from pc.errors import UserError
from pc.spectral import initial_vectors, power_iteration, spectral_norm_estimate, without_autocast

# What torch.compile and activation checkpointing insert into module names.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Values of `PCLinear.missing_call`.
MAKE_SCHEDULE = (
    "it has no pc.StepSchedule; call pc.StepSchedule(model, optimizer) after pc.attach, and after FSDP if used"
)
MATERIALISE = "it holds W; call schedule.materialise()"
UNFINISHED = (
    "it holds W, because not every optimizer given to its pc.StepSchedule has stepped; step them all, or call "
    "schedule.materialise()"
)
LOAD_STATE = (
    "its weight was loaded without the schedule's state; call schedule.load_state_dict() with that step's state, or "
    "schedule.materialise() to use the weight as W"
)
LOAD_WEIGHT = "its schedule's state was loaded without the weight; call model.load_state_dict() with that step's state"
REFRESH = "its weight was on the meta device; call pc.refresh(model) once the weights exist"


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


class PCLinear(nn.Linear):
    """A linear layer that multiplies by PC(W).

    `weight` keeps its name and shape [out_features, in_features], so initialisation, sharding and
    conversion treat the layer as any other. The layer adds the parameter `gamma` [1] (unless
    `learnable_gamma` is off) and, in schedule "forward", the buffers `u` [out_features] and `v` [in_features].

    Schedule "forward": `weight` is the raw W and PC(W) is part of the autograd graph; `u` and `v` are updated after
    every optimizer step that changed the weight. Schedule "step": `weight` is PC(W) between optimizer steps;
    `pc.StepSchedule` stores the raw W and swaps the two. The state dict then leaves out gamma too, so that it equals
    that of an `nn.Linear`.

    Raises:
        UserError: a forward pass without PC(W), or an optimizer step that would change PC(W) instead of W. The message
            names the missing call.
    """

    gamma: nn.Parameter | None
    u: Tensor
    v: Tensor

    missing_call: str
    """What to do before the layer can multiply by PC(W); empty when it can."""

    start_vectors: tuple[Tensor, Tensor] | None
    """Initial `u` [out_features] and `v` [in_features] for a `pc.StepSchedule`; None: random, seeded by the name."""

    def __init__(self, *args, name: str, config: PCConfig, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._add_pc(name, config)

    @classmethod
    def from_linear(cls, linear: nn.Linear, name: str, config: PCConfig) -> "PCLinear":
        """The same layer with PC. It shares `linear`'s parameters and keeps its hooks.

        Args:
            linear: an `nn.Linear`. A subclass with its own `forward` (float8, for example) keeps it. This works only in
                schedule "step", where `weight` is PC(W).
            name: the layer's full name in the model, which seeds `u` and `v`.
            config: with one level.

        Raises:
            UserError: a subclass with its own `forward` in schedule "forward".
        """
        kind: type = type(linear)
        if config.schedule == "forward" and type(linear).forward is not nn.Linear.forward:
            raise UserError(f'pc.schedule = "forward" would replace {kind.__name__}.forward of {name}; use "step"')
        layer_class = cls if kind is nn.Linear else _with_forward_of(kind)
        layer = layer_class.__new__(layer_class)
        # Keep hooks: tensor parallelism lives in them. Copy dicts, so that the two layers do not share them.
        layer.__dict__ = {key: copy(value) if isinstance(value, dict) else value for key, value in vars(linear).items()}
        layer._add_pc(name, config)
        layer.plain_class = kind
        return layer

    def to_linear(self, weight: Tensor) -> nn.Linear:
        """The layer that `from_linear` was given, with its class, hooks and other parameters, and this weight [n, m]."""
        linear = self.plain_class.__new__(self.plain_class)
        linear.__dict__ = {
            key: copy(value) if isinstance(value, dict) else value
            for key, value in vars(self).items()
            if key not in self.pc_attributes
        }
        for key in ("gamma", "u", "v"):
            linear._parameters.pop(key, None)
            linear._buffers.pop(key, None)
        linear.weight = nn.Parameter(weight.detach().clone(), requires_grad=self.weight.requires_grad)
        return linear

    def _add_pc(self, name: str, config: PCConfig) -> None:
        before = set(vars(self))
        self.plain_class: type[nn.Linear] = nn.Linear
        self.name, self.pc_config = name, config
        # TorchTitan checkpoints store gamma, u and v apart from the model's state, in either schedule.
        self.hides_pc_state = config.schedule == "step"
        device, dtype = self.weight.device, self.weight.dtype
        gamma = nn.Parameter(torch.empty(1, device=device, dtype=dtype)) if config.learnable_gamma else None
        self.register_parameter("gamma", gamma)
        if config.schedule == "forward":
            self.register_buffer("u", torch.empty(self.out_features, device=device, dtype=dtype))
            self.register_buffer("v", torch.empty(self.in_features, device=device, dtype=dtype))
        self.missing_call = REFRESH if config.schedule == "forward" else MAKE_SCHEDULE
        self.weight_was_loaded = False
        self.start_vectors = None
        self._observe_optimizers()
        self.pc_attributes = {"pc_attributes"} | (set(vars(self)) - before)
        if self.weight.device.type != "meta":
            self.reset_pc_parameters()

    def _observe_optimizers(self) -> None:
        self._refreshed = optimizer_hooks.now()
        self._note_weight()
        self._steps_without_gamma = 0
        optimizer_hooks.observe_as_layer(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._observe_optimizers()  # a copy

    def _apply(self, fn, recurse: bool = True) -> "PCLinear":
        on_meta = self.weight.device.type == "meta"
        super()._apply(fn, recurse)
        if on_meta and self.weight.device.type != "meta":
            self.reset_pc_parameters()
        return self

    @torch.no_grad()
    def reset_pc_parameters(self) -> None:
        """Set gamma to 1, and `u`, `v` to random vectors seeded by the layer's name."""
        if self.gamma is not None:
            self.gamma.fill_(1.0)
        if self.pc_config.schedule == "forward":
            u, v = initial_vectors(self.name, (self.out_features, self.in_features))
            self.u.copy_(u)
            self.v.copy_(v)

    @torch.no_grad()
    def refresh(self) -> None:
        """Schedule "forward": update `u` and `v` by `power_iterations` power iterations."""
        weight = self.weight
        if hasattr(weight, "full_tensor"):  # a DTensor, a class that is slow to import
            weight = weight.full_tensor()  # on every rank: this schedule is the simple reference, not the fast one
        with without_autocast(weight):
            u, v = power_iteration(weight.to(self.u.dtype), self.u, self.v, self.pc_config.power_iterations)
        self.u.copy_(u)
        self.v.copy_(v)
        self.missing_call = ""
        self._refreshed = optimizer_hooks.now()
        self._note_weight()

    def _note_weight(self) -> None:
        self._weight_id, self._weight_version = id(self.weight), self.weight._version

    def _was_changed_in_place(self) -> bool:
        """Whether the weight changed since `u` and `v` did. Not known of FSDP's unsharded copies."""
        return id(self.weight) == self._weight_id and self.weight._version != self._weight_version

    @torch.no_grad()
    def _refresh_if_stale(self) -> None:
        """After a change in place. New initial values need new `u` and `v`; DDP's broadcast of equal ones does not."""
        with without_autocast(self.weight):
            vectors = power_iteration(self.weight, self.u, self.v, 1)
            now, better = (spectral_norm_estimate(self.weight, u, v) for u, v in ((self.u, self.v), vectors))
        if abs(now - better) > 0.1 * better:
            self.refresh()
        self._note_weight()

    def before_step(self, optimizer: torch.optim.Optimizer, parameters: set[int], has_closure: bool) -> None:
        """Raise if this optimizer step would change PC(W) instead of W, or train W without PC."""
        if self.pc_config.schedule == "forward":
            if (
                self.gamma is None
                or not self.gamma.requires_grad
                or not {id(self.weight), id(self.gamma)} <= parameters
            ):
                return
            if self.weight.grad is not None and self.gamma.grad is None and not has_closure:
                raise UserError(
                    f"{self.name}.weight has a gradient and {self.name}.gamma has none: the model uses the weight "
                    'without calling the layer, so without PC; use schedule="step", or leave the layer out of blocks'
                )
            return
        holds_raw = self.missing_call in (MAKE_SCHEDULE, MATERIALISE, UNFINISHED)
        if not holds_raw and id(self.weight) in parameters and (self.weight.grad is not None or has_closure):
            raise UserError(
                f"{type(optimizer).__name__}.step() would train PC(W) of {self.name} instead of W: give the optimizer "
                "to the model's pc.StepSchedule(model, optimizer), or call schedule.pull_back() and "
                "schedule.restore_raw() before it (to copy a model: copy.deepcopy((model, optimizer, schedule)))"
            )

    def after_step(self, optimizer: torch.optim.Optimizer, parameters: set[int], began: int) -> None:
        """Schedule "forward": refresh once per step that changed the weight, however optimizers are nested."""
        if self.pc_config.schedule != "forward" or self.weight.device.type == "meta":
            return
        if self.gamma is None or not self.gamma.requires_grad or id(self.gamma) in parameters:
            self._steps_without_gamma = 0
        elif id(self.weight) in parameters:
            self._steps_without_gamma += 1
            if self._steps_without_gamma == 2:  # not 1: a second optimizer may step the gammas
                warnings.warn(
                    "no optimizer trains the gammas of PC layers; create optimizers after pc.attach and any sharding, "
                    "or set learnable_gamma=False",
                    stacklevel=2,
                )
        if self._refreshed >= began:
            return
        # Fused and foreach steps do not bump a DTensor's version, so check ids. An optimizer of weight copies does not
        # hold the weight itself, so check the version.
        if id(self.weight) in parameters or self._was_changed_in_place():
            self.refresh()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if self.missing_call:
            raise UserError(f"{self.name} cannot multiply by PC(W): {self.missing_call}")
        if self.pc_config.schedule == "step":
            return super().forward(x)
        if not torch.compiler.is_compiling() and self._was_changed_in_place():
            self._refresh_if_stale()
        weight = effective_weight(self.weight, self.gamma, self.u, self.v, self.pc_config)
        return F.linear(x, weight, self.bias)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.hides_pc_state:
            for key in ("gamma", "u", "v"):
                destination.pop(prefix + key, None)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if not self.weight.is_meta and any(t is not None and t.is_meta for t in (self.gamma, getattr(self, "u", None))):
            # load_state_dict(assign=True) of plain weights
            super()._apply(lambda t: torch.empty_like(t, device=self.weight.device) if t.is_meta else t)
            self.reset_pc_parameters()
        if self.hides_pc_state:
            hidden = {prefix + key for key in ("gamma", "u", "v")}
            missing[:] = [key for key in missing if key not in hidden]
        if prefix + "weight" in state_dict:
            self._note_loaded_weight(has_vectors=prefix + "u" in state_dict)

    def _note_loaded_weight(self, has_vectors: bool) -> None:
        if self.pc_config.schedule == "step":
            self.weight_was_loaded = True
            self.missing_call = {"": LOAD_STATE, LOAD_WEIGHT: ""}.get(self.missing_call, self.missing_call)
        elif has_vectors:
            self.missing_call = ""
            self._note_weight()
        elif not self.hides_pc_state and self.weight.device.type != "meta":
            self.refresh()  # plain weights

    def extra_repr(self) -> str:
        c = self.pc_config
        return (
            f"{super().extra_repr()}, level={c.level}, schedule={c.schedule}, "
            f"norm_recovery={c.norm_recovery}, learnable_gamma={c.learnable_gamma}"
        )


@cache
def _with_forward_of(kind: type[nn.Linear]) -> type[PCLinear]:
    """A PC layer with the `forward` of `kind`."""
    return type(f"PC{kind.__name__}", (PCLinear, kind), {"__reduce_ex__": _reduce})


def _reduce(layer: PCLinear, protocol: int) -> tuple:
    """For pickle and deepcopy, which do not find a class that was made at run time."""
    return _empty, (layer.plain_class,), layer.__dict__


def _empty(kind: type[nn.Linear]) -> PCLinear:
    layer_class = _with_forward_of(kind)
    return layer_class.__new__(layer_class)


def refuse_shared_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Raise a `UserError` if the weight of one of these layers also belongs to another module."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(clean_name(name))
    for sharing in owners.values():
        chosen = [owner for owner in sharing if owner in names]
        if chosen and len(sharing) > 1:
            other = next(owner for owner in sharing if owner != chosen[0])
            raise UserError(f"pc.blocks: {chosen[0]}.weight is shared with {other}; PC needs a separate weight")


def clean_name(name: str) -> str:
    """A module or parameter name without the parts that torch.compile and activation checkpointing insert."""
    for part in _WRAPPER_NAMES:
        name = name.replace(part, "")
    return name


def named_pc_linears(model: nn.Module) -> Iterator[tuple[str, PCLinear]]:
    """Every PC layer with its clean full name, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, PCLinear):
            yield clean_name(name), module


def block_of(name: str) -> str | None:
    """The paper's short name (q, k, v, o, gate, up, down) of a Llama linear layer; None for any other."""
    for block, suffixes in BLOCK_SUFFIXES.items():
        if name.endswith(suffixes):
            return block
    return None

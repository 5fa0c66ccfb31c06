"""`attach` marks the weights of any model that get PC; `merge` makes it a plain model with PC(W) again."""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pc.config import BLOCK_GROUPS, BLOCK_SUFFIXES, Cut, PCConfig, block_of, matches
from pc.cuts import Form, form_of, known_cuts
from pc.errors import UserError
from pc.linear import PCLinear
from pc.shards import viewed

# What torch.compile and activation checkpointing insert into module names.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")

NO_SCHEDULE = "it has no schedule; call pc.schedule(model, optimizer) after pc.attach, and after FSDP or DDP if used"
# In the metadata of a state dict: its weights are PC(W), of which only the schedule's state has the W.
MARKER = "pc"


@dataclass(eq=False)
class Weight:
    """A weight with PC: a parameter of a module, how it is cut into matrices, and its tensors, all sharded alike."""

    name: str
    """full name of the module, or of the parameter if it is not called "weight\""""
    module: Any
    """an nn.Module"""
    key: str
    """of the parameter in its module"""
    form: Form
    is_hidden: bool
    """whether the model's state dict leaves out what PC adds, because the schedule's state has it"""
    missing: str = NO_SCHEDULE
    """why the weight is not, or will not be multiplied as, PC(W); empty if it is"""
    schedule: Any = None
    """which computes PC(W); a copy of the model alone has none"""
    is_loaded_pc: bool = False
    """whether the model's last state dict had PC(W) here"""
    entries: list[nn.Module] = field(default_factory=list)
    """modules whose forward pass first needs PC(W): the weight's own, and those of one weight also the whole model"""
    hooks: list[RemovableHandle] = field(default_factory=list)
    """of the module, as long as it has PC"""
    forward_hooks: list[RemovableHandle] = field(default_factory=list)
    """of the entries, while something is missing"""
    held: tuple[nn.Parameter, nn.Parameter | None] | None = None
    """the sharded parameter and gamma, from the schedule: for a while FSDP puts gathered ones into the module"""
    raw: Any = None
    """W, from the schedule"""
    u: Any = None
    v: Any = None
    """None: random, seeded by the name, when there is a schedule"""

    def __getstate__(self) -> dict:
        return self.__dict__ | {"schedule": None}  # a copy of the schedule sets it again

    @property
    def parameter(self) -> nn.Parameter:
        """W, or PC(W) in schedule "step" between optimizer steps."""
        return self.held[0] if self.held else getattr(self.module, self.key)

    @property
    def gamma(self) -> nn.Parameter | None:
        """[matrices], also of a stack. Schedule "step" adds it; nothing before it sees it."""
        return self.held[1] if self.held else getattr(self.module, self.gamma_key, None)

    @property
    def config(self) -> PCConfig:
        """Of the first part. All parts share all settings but `level`."""
        return self.form.chosen[0].config

    @property
    def gamma_key(self) -> str:
        return "gamma" if self.key == "weight" else f"{self.key}_gamma"

    @property
    def gammas(self) -> tuple[Tensor, ...]:
        """As the form's tensor of kind "g"."""
        if self.gamma is None:
            return ()
        return (viewed(self.gamma.detach(), self.form.shape_of("g")) if self.form.stack else self.gamma,)

    def set_missing(self, reason: str) -> None:
        """Before forward passes, see to what is missing; "": allow them, without any check in the way."""
        if reason and not self.forward_hooks:
            # before FSDP's own, which gathers the weights
            self.forward_hooks = [m.register_forward_pre_hook(_before_forward, prepend=True) for m in self.entries]
        elif not reason:
            while self.forward_hooks:
                self.forward_hooks.pop().remove()
        self.missing = reason

    def require_pc(self) -> None:
        """Compute PC(W) if the weight does not hold it.

        Raises:
            UserError: there is no schedule.
        """
        if self.missing and self.schedule is None:
            raise UserError(f"there is no PC(W) of {self.name}: {self.missing}")
        if self.missing:
            self.schedule.materialise()

    def remove(self) -> None:
        """Leave a plain module, whose parameter stays as it is."""
        self.set_missing("")
        while self.hooks:
            self.hooks.pop().remove()
        if isinstance(self.module, PCLinear):
            self.module.remove_pc()
        elif self.gamma is not None:
            delattr(self.module, self.gamma_key)
        self.module.__dict__.pop("pc_weights", None)


def attach(model: nn.Module, config: PCConfig) -> nn.Module:
    """Mark the weights that `config.blocks` matches, in place; returns the model.

    In schedule "step" nothing else changes. In schedule "forward" an `nn.Linear` becomes a `pc.PCLinear`. Forward passes
    are refused until `pc.schedule` is called. Call `attach` before wrapping with DDP or FSDP.

    The current weight becomes W. For trained weights call `pc.preserve` next: it makes the current weight PC(W).

    Raises:
        UserError: an entry of `blocks` matches nothing, or a weight without a cut, or misses a weight beside those that
            it finds; a weight is matched twice; the model has PC already, or is wrapped; in schedule "forward", a
            weight that is not an `nn.Linear`'s, or is several matrices, or whose layer is not called. The model is then
            as before.
    """
    for module in model.modules():
        if hasattr(module, "pc_weights"):
            raise UserError("the model already has PC; call pc.attach only once, or pc.detach first")
        if hasattr(module, "no_sync") or hasattr(module, "unshard"):
            raise UserError("the model is already wrapped in DDP or FSDP; call pc.attach first")
    weights, others = find(model, config)
    _require_complete(config, weights, others)
    if config.schedule == "forward":
        readers = [m for m in model.modules() if isinstance(m, (nn.MultiheadAttention, nn.TransformerEncoderLayer))]
        not_called = {module for reader in readers for module in reader.modules()}
        for weight in weights.values():
            _require_called(weight, not_called)
    for index, weight in enumerate(weights.values()):
        weight.entries = [weight.module, *([model] if index == 0 else [])]
        _mark(weight)
    return model


def _require_called(weight: Weight, not_called: set[nn.Module]) -> None:
    module = weight.module
    is_plain = type(module).forward is nn.Linear.forward and weight.key == "weight" and module not in not_called
    if not is_plain or [part.count for part in weight.form.parts] != [1]:
        raise UserError(
            f'pc.schedule = "forward" multiplies by PC(W) of one matrix, in the call of its layer, which {weight.name}, '
            f'a {type(module).__name__}, does not allow; use "step"'
        )


def _mark(weight: Weight) -> None:
    module = weight.module
    if weight.config.schedule == "forward":
        PCLinear.add_pc(module, weight.name, weight.config)
    if not hasattr(module, "pc_weights"):
        module.pc_weights = {}
        weight.hooks += [
            module.register_state_dict_pre_hook(_before_state_dict),
            module.register_state_dict_post_hook(_leave_out),
            module.register_load_state_dict_pre_hook(_expect_none),
        ]
    module.pc_weights[weight.key] = weight
    weight.set_missing(NO_SCHEDULE)


def _before_forward(module: nn.Module, _) -> None:
    for _, weight in named_weights(module):
        weight.require_pc()


def _before_state_dict(module: Any, *_) -> None:
    for weight in module.pc_weights.values():
        if weight.schedule is not None and weight.schedule.has_started:
            weight.require_pc()


def _hidden(module: Any) -> Iterator[str]:
    """What the model's state dict leaves out of a module."""
    for weight in module.pc_weights.values():
        if weight.is_hidden:
            keys = (weight.gamma_key, "u", "v") if isinstance(module, PCLinear) else (weight.gamma_key,)
            yield from (key for key in keys if getattr(module, key, None) is not None)


def _leave_out(module: Any, state_dict: dict, prefix: str, metadata: dict) -> None:
    for key in _hidden(module):
        state_dict.pop(prefix + key, None)
    if any(weight.raw is not weight.parameter and not weight.missing for weight in module.pc_weights.values()):
        metadata[MARKER] = True


def _expect_none(module: Any, state_dict: dict, prefix: str, metadata: dict, *_) -> None:
    for key in _hidden(module):
        state_dict.setdefault(prefix + key, getattr(module, key))
    for key, weight in module.pc_weights.items():
        if prefix + key in state_dict:
            weight.is_loaded_pc = MARKER in metadata


class Other(NamedTuple):
    """A weight of two dimensions or more without PC."""

    shape: list[int]
    is_known: bool
    """whether it has a cut, or is known to be none of the blocks"""


def find(model: nn.Module, config: PCConfig) -> tuple[dict[str, Weight], dict[str, Other]]:
    """The weights that `config` names, unmarked, and all others, by their parameters' full names.

    Raises:
        UserError: a weight is matched twice, or without a cut, or the cut does not fit.
    """
    weights: dict[str, Weight] = {}
    others: dict[str, Other] = {}
    modules = {clean_name(name): module for name, module in model.named_modules()}
    cuts = {_join(name, key): cut for name, module in modules.items() for key, cut in known_cuts(module).items()}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            full = _join(name, key)
            if parameter.ndim < 2:
                continue
            if given := [cut for pattern, cut in (config.cuts or {}).items() if fnmatch.fnmatchcase(full, pattern)]:
                cuts[full] = given[0]
            is_known, cut = full in cuts, cuts.get(full)
            if not is_known and isinstance(module, nn.Linear) and key == "weight":
                block = block_of(name)
                is_known, cut = block is not None, Cut((block or "",))
            entries = [_entry_of(config, block, name, full) for block in (cut.blocks if cut else ("",))]
            if not any(entries):
                others[full] = Other([*parameter.shape], is_known)
                continue
            if cut is None:
                raise UserError(
                    f"pc.blocks: {entries[0]!r} matches {full}, a weight of {type(module).__name__}, which has no cut; "
                    "give it one in PCConfig.cuts (pc.Cut)"
                )
            head_dims = [cut.head_dim or _head_dim(config, block, name, modules) for block in cut.blocks]
            configs = [config.for_block(entry) if entry else None for entry in entries]
            form = form_of(full, parameter.shape, cut, configs, head_dims)
            short = name if key == "weight" and name else full
            weights[full] = Weight(short, module, key, form, is_hidden=config.schedule == "step")
    return weights, others


def _require_complete(config: PCConfig, weights: dict[str, Weight], others: dict[str, Other]) -> None:
    """Raise a `UserError` if an entry of `blocks` finds nothing, or may miss an unknown weight beside its own."""
    for entry in config.blocks:
        found = [
            full for full, weight in weights.items() if any(p.config.blocks == (entry,) for p in weight.form.chosen)
        ]
        if not found:
            raise UserError(
                f"pc.blocks: {entry!r} matches no weight of the model; see print(pc.describe(model, config))"
            )
        modules = {full.removesuffix(f".{weights[full].key}") for full in found}
        beside = tuple(f"{_all_layers(name.rpartition('.')[0])}." for name in modules if "." in name)
        unknown = {_all_layers(full) for full, other in others.items() if not other.is_known}
        missed = sorted(name for name in unknown if name.startswith(beside))
        if missed and (entry in BLOCK_SUFFIXES or entry in BLOCK_GROUPS):
            raise UserError(
                f"pc.blocks: {entry!r} does not know {', '.join(missed)} beside the weights that it finds; say in "
                "PCConfig.cuts how it is cut (pc.Cut), or None to leave it out"
            )


def _entry_of(config: PCConfig, block: str, name: str, full: str) -> str | None:
    """The entry of `blocks` that matches a part."""
    entries = [entry for entry in config.blocks if matches(entry, name, block) or matches(entry, full, block)]
    if len(entries) > 1:
        raise UserError(f"pc.blocks: {entries[1]!r} matches {name}, which an earlier entry matches too")
    return entries[0] if entries else None


def _head_dim(config: PCConfig, block: str, name: str, modules: dict[str, nn.Module]) -> int:
    """Rows of one head, from the attention module around the layer; 0 if the block is not cut into heads."""
    if block not in config.heads:
        return 0
    path = name
    while path:
        for key in _HEAD_DIMS:
            if isinstance(value := getattr(modules[path], key, None), int):
                return value
        path = path.rpartition(".")[0]
    raise UserError(f"pc.heads: no module around {name} has a head_dim; give its cut in PCConfig.cuts")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _all_layers(name: str) -> str:
    """A name with all layers made one: "layers.0.mlp" to "layers.*.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def describe(model: nn.Module, config: PCConfig) -> str:
    """Which weights get PC, as which matrices, and which are left out; one line for each kind, to print.

    Args:
        model: before `attach`.
    """
    weights, others = find(model, config)
    lines = []
    for full, weight in weights.items():
        lines.append(f"{_all_layers(full)} {[*weight.parameter.shape]}: {weight.form}")
    for full, other in others.items():
        lines.append(f"left out: {_all_layers(full)} {other.shape}{'' if other.is_known else ', no known cut'}")
    return "\n".join(f"{count} x {line}" for line, count in Counter(lines).items())


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Make every weight the plain parameter PC(W) of a layer as it was before `attach`, in place; returns the model.

    The result has no overhead and does not need this package (paper, remark 1). The schedule leaves the optimizers.

    Raises:
        UserError: there is no schedule, a weight was changed while it held PC(W), or weights of schedule "forward" are
            sharded. The model is then as before.
    """
    weights = [weight for _, weight in named_weights(model)]
    for weight in weights:
        weight.require_pc()
        if isinstance(weight.module, PCLinear) and hasattr(weight.module.weight, "full_tensor"):
            raise UserError(f'pc.merge cannot get PC(W) of {weight.name}: its weight is sharded; use schedule="step"')
    for schedule in {weight.schedule for weight in weights if weight.schedule is not None}:
        schedule.require_unchanged(alone=True)  # as one rank may merge
    for weight in weights:
        if isinstance(weight.module, PCLinear):
            effective = weight.module.effective_weight()
            weight.module.weight = nn.Parameter(effective, requires_grad=weight.module.weight.requires_grad)
    _remove(weights)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undo `attach` and `pc.schedule`: plain layers that hold W, in place; returns the model."""
    weights = [weight for _, weight in named_weights(model)]
    for schedule in {weight.schedule for weight in weights if weight.schedule is not None}:
        schedule.write_raw()
    _remove(weights)
    return model


def _remove(weights: list[Weight]) -> None:
    for schedule in {weight.schedule for weight in weights if weight.schedule is not None}:
        schedule.leave()
    for weight in weights:
        weight.remove()


def refresh(model: nn.Module) -> None:
    """Update `u` and `v` of every PC layer of schedule "forward" by `power_iterations` power iterations.

    The schedule does this after every optimizer step, and a layer when plain weights are loaded into it. Call it after
    changing weights in another way, or to evaluate a model without a schedule.
    """
    for _, weight in named_weights(model):
        if isinstance(weight.module, PCLinear):
            weight.module.refresh()
            weight.set_missing("")


def clean_name(name: str) -> str:
    """A module or parameter name without the parts that torch.compile and activation checkpointing insert."""
    for part in _WRAPPER_NAMES:
        name = name.replace(part, "")
    return name


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Every marked weight with its name, in the model's order."""
    for module in model.modules():
        for weight in getattr(module, "pc_weights", {}).values():
            yield weight.name, weight

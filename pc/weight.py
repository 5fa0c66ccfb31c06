"""A weight that `pc.attach` has marked: what belongs to it, and what keeps a forward pass from using W for PC(W)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pc.config import PCConfig
from pc.errors import UserError
from pc.layer import PCLinear, add_pc
from pc.shards import viewed
from pc.splits import WeightSplit

NO_PRECONDITIONER = (
    "it has no preconditioner; call pc.precondition(model, optimizer) after pc.attach, and after FSDP or DDP if used"
)
# In the metadata of a state dict: its weights are PC(W); W is in the preconditioner's state alone.
MARKER = "pc"


@dataclass(eq=False)
class Weight:
    """A marked weight: a parameter of a module, how it is split into matrices, and its tensors, all sharded alike.

    `pc.attach` sets the first group of fields. The others change: the guard whenever PC(W) comes or goes, and the
    tensors when `pc.precondition` takes over, which may also guard more modules.
    """

    name: str
    """full name of the module; or of the parameter, if that is not "weight" """
    module: Any
    """an nn.Module"""
    attribute: str
    """name of the parameter in its module"""
    split: WeightSplit
    state_is_apart: bool = True
    """Whether the model's state dict leaves out what PC adds, because the preconditioner's state has it. Always in mode
    "step"; in mode "forward" where a trainer sets it, as the recipe's does."""
    guarded: list[nn.Module] = field(default_factory=list)
    """Modules whose forward pass first needs PC(W): its own; of the model's first weight also the whole model, whose hook
    writes PC(W) of all weights at once"""
    hooks: list[RemovableHandle] = field(default_factory=list)
    """of the module, as long as it has PC"""

    needs: str = NO_PRECONDITIONER
    """why a forward pass may not use the weight yet, and what to call, as an error says it; empty: it may"""
    forward_hooks: list[RemovableHandle] = field(default_factory=list)
    """of the guarded modules, while `needs` is not empty"""

    preconditioner: Any = None
    """a `Preconditioner`, which computes PC(W); a copy of the model alone has none"""
    is_loaded_pc: bool = False
    """whether the last state dict that was loaded into the model had PC(W) here"""
    parameters: tuple[nn.Parameter, nn.Parameter | None] | None = None
    """the parameter and gamma, from `pc.precondition` on: the sharded ones. During a forward pass FSDP puts unsharded
    ones in their place in the module."""
    raw: Any = None
    """W, from `pc.precondition` on"""
    u: Any = None
    v: Any = None
    """None until `pc.preserve` computes them or `pc.precondition` draws them, seeded by the name"""

    def mark(self, guarded: list[nn.Module]) -> None:
        """Put it into `pc_weights` of its module; from now on forward passes are refused."""
        self.guarded, module = guarded, self.module
        if self.config.mode == "forward":
            add_pc(module, self.name, self.config)
            self.state_is_apart = False
        if not hasattr(module, "pc_weights"):
            module.pc_weights = {}
            self.hooks += [
                module.register_state_dict_pre_hook(_before_state_dict),
                module.register_state_dict_post_hook(_leave_out),
                module.register_load_state_dict_pre_hook(_put_back),
            ]
        module.pc_weights[self.attribute] = self
        self.guard(NO_PRECONDITIONER)

    def remove(self) -> None:
        """Leave a plain module, whose parameter stays as it is."""
        self.guard("")
        while self.hooks:
            self.hooks.pop().remove()
        if isinstance(self.module, PCLinear):
            self.module.remove_pc()
        elif self.gamma is not None:
            delattr(self.module, self.gamma_attribute)
        self.module.__dict__.pop("pc_weights", None)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"preconditioner": None}  # a copy of the preconditioner sets it again

    @property
    def entries(self) -> set[str]:
        """The entries of `PCConfig.blocks` that name its matrices."""
        return {part.config.blocks[0] for part in self.split.parts if part.config}

    @property
    def parameter(self) -> nn.Parameter:
        """W, or PC(W) in mode "step" between optimizer steps."""
        return self.parameters[0] if self.parameters else getattr(self.module, self.attribute)

    @property
    def gamma(self) -> nn.Parameter | None:
        """[P] for P matrices of one gamma each, [E P] for a stack. In mode "step" `pc.precondition` adds it, so that no
        wrapper sees it."""
        return self.parameters[1] if self.parameters else getattr(self.module, self.gamma_attribute, None)

    @property
    def config(self) -> PCConfig:
        """With one level, that of the first part; all other settings are those of all parts."""
        return self.split.chosen[0].method.config

    @property
    def gamma_attribute(self) -> str:
        return "gamma" if self.attribute == "weight" else f"{self.attribute}_gamma"

    @property
    def gammas(self) -> tuple[Tensor, ...]:
        """Gamma in the shape that the split takes, [P] or [E, P], or nothing."""
        if self.gamma is None:
            return ()
        return (viewed(self.gamma.detach(), self.split.gamma_shape) if self.split.stack else self.gamma,)

    def guard(self, needs: str) -> None:
        """Set `needs`. While it is not empty, a hook calls `ensure_pc` before a forward pass; forward passes of weights that
        hold PC(W) have no hook."""
        if needs and not self.forward_hooks:
            # before FSDP's own, which gathers the weights
            self.forward_hooks = [m.register_forward_pre_hook(_before_forward, prepend=True) for m in self.guarded]
        elif not needs:
            while self.forward_hooks:
                self.forward_hooks.pop().remove()
        self.needs = needs

    def ensure_pc(self) -> None:
        """Write PC(W) if the weight does not hold it.

        Raises:
            UserError: there is no preconditioner.
        """
        if not self.needs:
            return
        if self.preconditioner is None:
            raise UserError(f"there is no PC(W) of {self.name}: {self.needs}")
        self.preconditioner.write_pc()


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Every marked weight with its name, in the model's order."""
    for module in model.modules():
        # of the module itself: a wrapper such as peft's hands attributes of the wrapped module on
        for weight in vars(module).get("pc_weights", {}).values():
            yield weight.name, weight


def _before_forward(module: nn.Module, _) -> None:
    for _, weight in named_weights(module):
        weight.ensure_pc()


def _before_state_dict(module: Any, *_) -> None:
    for weight in module.pc_weights.values():
        if weight.preconditioner is not None and weight.preconditioner.has_started:
            weight.ensure_pc()


def _left_out(module: Any) -> Iterator[str]:
    """What the model's state dict leaves out of a module."""
    for weight in module.pc_weights.values():
        if weight.state_is_apart:
            keys = (weight.gamma_attribute, "u", "v") if isinstance(module, PCLinear) else (weight.gamma_attribute,)
            yield from (key for key in keys if getattr(module, key, None) is not None)


def _leave_out(module: Any, state_dict: dict, prefix: str, metadata: dict) -> None:
    for key in _left_out(module):
        state_dict.pop(prefix + key, None)
    if any(weight.config.mode == "step" and not weight.needs for weight in module.pc_weights.values()):
        metadata[MARKER] = True  # these weights are PC(W)


def _put_back(module: Any, state_dict: dict, prefix: str, metadata: dict, *_) -> None:
    """Add what `_leave_out` took away, so that a strict load misses nothing."""
    for key in _left_out(module):
        state_dict.setdefault(prefix + key, getattr(module, key))
    for key, weight in module.pc_weights.items():
        if prefix + key in state_dict:
            weight.is_loaded_pc = MARKER in metadata

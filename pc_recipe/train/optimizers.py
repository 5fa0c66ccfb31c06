"""A run's optimizers: parameter groups by name, checkpoints of all optimizer states, and PC around the step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR
from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from pc.api import precondition
from pc.blocks import block_of
from pc.config import MatrixSplit
from pc.preconditioner import Preconditioner
from pc.targets import clean_name
from pc.weight import named_weights
from pc_recipe.config.optimizers import KINDS, OptimizerSection
from pc_recipe.config.sections import block_factor
from pc_recipe.train.spans import Spans

_SPLIT = ".split"
"""the end of the names in a state under which torch puts how groups split their weights"""


def is_hidden_matrix(name: str) -> bool:
    """Whether the optimizer that `optimizer.name` names trains a parameter. AdamW trains embedding, head, norms and gammas.

    Raises:
        ValueError: an unknown name, for which no optimizer is guessed.
    """
    layer, _, attribute = name.rpartition(".")
    gammas = ("weight_gamma", "gamma")  # the second is a `PCLinear`'s
    if block_of(layer) and attribute in ("weight", "weight_orig", *gammas):
        return attribute not in gammas
    if name in ("tok_embeddings.weight", "output.weight") or name.endswith("norm.weight"):
        return False
    raise ValueError(f"no optimizer for parameter {name}")


class Optimizers(OptimizersContainer):
    """AdamW, or the config's optimizer and AdamW, for each model part; with PC, they train W in place of PC(W).

    TorchTitan's container saves only one optimizer per model part; this one saves all.
    """

    def __init__(self, model_parts: list[nn.Module], config: OptimizerSection) -> None:
        self.model_parts = model_parts
        self._peak = KINDS[config.name].lr(config)
        self.preconditioner: Preconditioner | None = None
        """PC's"""
        if any(True for model in model_parts for _ in named_weights(model)):
            self.preconditioner = precondition(model_parts)  # first: groups depend on the names of W and gamma
        self.by_part = [_build(model, config) for model in model_parts]
        self.optimizers = [optimizer for by_kind in self.by_part for optimizer in by_kind.values()]
        parameters = [p for model in model_parts for p in model.parameters()]
        self._post_init(parameters, {"lr": config.lr})
        self.pc_times = Spans()
        """of PC's two passes on this rank: the trainer times the pull back"""
        if self.preconditioner is not None:
            for optimizer in self.optimizers:  # hooks run in this order: PC(W) is written between these two
                optimizer.register_step_post_hook(self.pc_times.begin)
            self.preconditioner.follow(*self.optimizers)
            for optimizer in self.optimizers:
                optimizer.register_step_post_hook(self.pc_times.end)
        self.saved_rates: list[float] = []
        """learning rates of the next step by the loaded checkpoint's schedule"""
        self.skips_step = False
        """whether this step is skipped; the checkpoint manager reads it too"""

    def state_dict(self) -> dict[str, Any]:
        """Without splits: only some groups have one, by the config, and a checkpoint must have every name that is read."""
        return {name: value for name, value in self._whole_state().items() if not name.endswith(_SPLIT)}

    def _whole_state(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state: dict[str, Any] = {}
        for model, by_kind in zip(self.model_parts, self.by_part, strict=True):
            state |= get_optimizer_state_dict(model, list(by_kind.values()), options=options)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizers' tensors; learning rate, weight decay, split and so on stay those of the config."""
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]
        splits = {name: value for name, value in self._whole_state().items() if name.endswith(_SPLIT)}
        state_dict = state_dict | splits  # torch asks for them
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        for model, by_kind in zip(self.model_parts, self.by_part, strict=True):
            set_optimizer_state_dict(model, list(by_kind.values()), optim_state_dict=state_dict, options=options)
        self.saved_rates = self.rates()
        for group, of_config in zip(self._groups(), settings, strict=True):  # torch has made new groups
            group.update(of_config)

    def rates(self) -> list[float]:
        """The learning rate that each group has now."""
        return [group["lr"] for group in self._groups()]

    def rate(self) -> float:
        """The current rate of the config's optimizer, without `lr_factors`; the same on all pipeline stages."""
        group = self._groups()[0]
        return self._peak * (group["lr"] / group["initial_lr"] if group["initial_lr"] else 1.0)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class LRSchedulers(LRSchedulersContainer):
    """TorchTitan's schedulers. A checkpoint has the step of each kind of optimizer; the learning rates follow from the
    config, which may have changed."""

    def __init__(self, optimizers: Optimizers, factor: Callable[[int], float]) -> None:
        super().__init__(optimizers, factor)
        self._kinds = [kind for by_kind in optimizers.by_part for kind in by_kind]

    def state_dict(self) -> dict[str, Any]:
        # Optimizers of one kind have the same schedule in all pipeline stages.
        return {kind: {"last_epoch": s.last_epoch} for kind, s in zip(self._kinds, self.schedulers, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for kind, scheduler in zip(self._kinds, self.schedulers, strict=True):
            assert isinstance(scheduler, LambdaLR)
            scheduler.last_epoch = state_dict[kind]["last_epoch"]
            groups = scheduler.optimizer.param_groups
            for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                group["lr"] = peak * factor(scheduler.last_epoch)


def rate_factor(schedule: Any, training_steps: int) -> Callable[[int], float]:
    """The function of a step, from 0, that gives its share of the peak rate: TorchTitan's warmup, plateau and decay, from
    the section `lr_scheduler`. After the schedule's end, where TorchTitan's would rise again or fall below zero, the rate
    stays at that of its last step."""
    optimizers: Any = [torch.optim.SGD([torch.zeros(1)], lr=1.0)]  # TorchTitan makes its function for optimizers alone
    [factor] = build_lr_schedulers(optimizers, schedule, training_steps).schedulers[0].lr_lambdas  # type: ignore
    last = (schedule.total_steps or training_steps) - 1
    return lambda step: factor(min(step, last))


def build_schedulers(optimizers: Optimizers, titan: Any, training_steps: int) -> LRSchedulers:
    """`rate_factor` for every optimizer; titan: TorchTitan's own section `lr_scheduler`."""
    return LRSchedulers(optimizers, rate_factor(titan, training_steps))


def _build(model: nn.Module, config: OptimizerSection) -> dict[str, torch.optim.Optimizer]:
    """{kind: optimizer}: the config's optimizer for the hidden matrices, AdamW for the rest."""
    members: dict[str, dict[tuple[float, bool], list[nn.Parameter]]] = {config.name: {}, "AdamW": {}}
    """{kind: {(factor of the learning rate, whether a weight is one matrix for each attention head): parameters}}"""
    parameters = {clean_name(name): parameter for name, parameter in model.named_parameters()}
    for name, parameter in parameters.items():
        if f"{name}_orig" in parameters:
            continue  # PC(W)
        kind, factor, heads = "AdamW", 1.0, False
        if is_hidden_matrix(name):
            layer = name.rpartition(".")[0]
            kind, factor = config.name, block_factor(config.lr_factors, layer)
            heads = KINDS[kind].splits_heads and block_of(layer) in config.muon_heads
        members[kind].setdefault((factor, heads), []).append(parameter)
    made = {}
    for kind, by_setting in members.items():
        count = sum(parameter.numel() for some in by_setting.values() for parameter in some)
        logger.info(f"{kind} trains {count:,} parameters")
        settings = sorted(by_setting, key=lambda setting: (setting[0] != 1, *setting))  # a factor of 1 first (`rate`)
        groups = [_group(model, config, kind, *setting, by_setting[setting]) for setting in settings]
        if groups:
            made[kind.lower()] = KINDS[kind].build(groups, config)
    return made


def _group(
    model: nn.Module, config: OptimizerSection, kind: str, factor: float, heads: bool, some: list[nn.Parameter]
) -> dict[str, Any]:
    """A parameter group, with its own learning rate and decay."""
    lr = KINDS[kind].lr(config) * factor
    group: dict[str, Any] = {"params": some, "lr": lr, "weight_decay": 0.0}
    if not KINDS[kind].keeps_norms:
        # torch multiplies the decay by the rate
        group["weight_decay"] = config.weight_decay / (lr if config.independent_decay else 1)
    if heads:
        args: Any = model.model_args
        group["split"] = MatrixSplit(head_dim=args.dim // args.n_heads)
    return group

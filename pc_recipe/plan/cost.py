"""The cost of a step: FLOPs of the model and of PC.

Torch's counter counts PC on the meta device: a matmul of [a, b] and [b, c] is 2abc FLOPs, elementwise operations none,
as in the paper's appendix.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop

from pc.assignment import assign
from pc.config import PCConfig
from pc.measure import cost_bound
from pc.method import method_of
from pc.step import KEPT_BYTES
from pc_recipe.config import Config
from pc_recipe.config.model_sizes import count_parameters, shape_of
from pc_recipe.config.rank_batches import RankBatches
from pc_recipe.pages import markdown
from pc_recipe.plan import micro_batch
from pc_recipe.plan.memory import count_kept_bytes, find_weights, matrices_of
from pc_recipe.plan.needs import describe_pc


@cache
def step_flops(n: int, m: int, config: PCConfig, keeps: bool) -> int:
    """FLOPs of both passes of PC over a matrix [n, m]. `keeps`: the second reuses what the first kept."""
    with torch.device("meta"):
        weight, method = torch.empty(1, n, m), method_of(config)
        gamma, u, v = (torch.empty(1, size) for size in (1, n, m))
    kept = method.evaluate(weight, gamma, u, v)[-1] if keeps else ()
    return _counted(lambda: method.evaluate(weight, gamma, u, v)) + _counted(
        lambda: method.pull_back(weight, weight, gamma, u, v, kept)
    )


def _counted(function: Callable[[], object]) -> int:
    """Torch has no formula for the CPU's attention. Its forward pass counts half, as it is causal; its backward pass, 0."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    causal = {attention: lambda *shapes, **_: sdpa_flop(*shapes[:3]) // 2}
    with FlopCounterMode(display=False, custom_mapping=causal) as counter:
        function()
    return counter.get_total_flops()


@dataclass(frozen=True)
class StepCost:
    """FLOPs of one optimizer step of the whole job, unless said otherwise."""

    model: float
    """Attention is counted causally, as by a kernel that skips the upper triangle; recomputation is not counted."""
    model_full_square: float
    """Attention is counted fully, as TorchTitan does for its MFU."""
    recomputed: int
    """What activation checkpointing repeats of `model`."""
    pc: int
    pc_busiest: int
    """PC on the rank with the most work."""
    paper_bound: float
    """The paper's bound, the largest over matrices; its B is the tokens of the global batch."""


class RunCost:
    """A config on `world_size` GPUs.

    Raises:
        UserError: the config does not fit the number of GPUs.
    """

    def __init__(self, config: Config, world_size: int) -> None:
        self.shape = shape_of(config.model)
        self.parameters = count_parameters(config.model)
        self.config = micro_batch.choose(config, world_size)
        self.batches = RankBatches.of(self.config, world_size)
        self.tokens = self.batches.tokens
        self.splits = [weight.split for weight in find_weights(config)]
        self.matrices = [matrix for split in self.splits for matrix in matrices_of(split)]

    def step_cost(self) -> StepCost:
        """FLOPs of one step; counts PC even if the config has it off."""
        dims, seq_len = self.batches.dims, self.config.training.seq_len
        load = [0] * (self.batches.fsdp_ranks * dims.tp)
        free = [KEPT_BYTES * dims.pp for _ in load]  # a pipeline stage evaluates only its own matrices
        for split, owner in zip(self.splits, assign([split.cost for split in self.splits], len(load)), strict=True):
            kept = sum(count_kept_bytes(*matrix) for matrix in matrices_of(split))
            keeps = kept <= free[owner]
            free[owner] -= kept * keeps
            load[owner] += sum(step_flops(*matrix, keeps) for matrix in matrices_of(split))
        bounds = [cost_bound((n, m), self.tokens, config) for n, m, config in self.matrices]
        # as TorchTitan, whose import takes seconds: per weight 2 FLOPs forward and 4 backward, none for the embedding
        embedding = self.config.model.vocab_size * self.shape.dim
        of_weights = 6 * (self.parameters - embedding)
        upper_triangle = 6 * self.shape.n_layers * self.shape.dim * seq_len  # of scores and their matmul with values
        return StepCost(
            model=self.tokens * (of_weights + upper_triangle),
            model_full_square=self.tokens * (of_weights + 2 * upper_triangle),
            recomputed=self._recomputed_flops(),
            pc=sum(load) * dims.dp_replicate,  # every replica repeats the work
            pc_busiest=math.ceil(max(load) / dims.pp),
            paper_bound=max(bounds),
        )

    def gpu_hours(self, tflops: float | None = None) -> float:
        """Hours of one GPU for the whole run, without validation and checkpoints.

        Args:
            tflops: TFLOP/s of one GPU; None: `assume_tflops`.
        """
        cost, pc = self.step_cost(), self.config.pc
        operations = cost.model + cost.recomputed
        if pc.enable:
            operations += cost.pc
        return self.config.training.steps * operations / (3600e12 * (tflops or assume_tflops(self.shape.dim)))

    def _recomputed_flops(self) -> int:
        """FLOPs for all sequences of a step, counted on a fake model that takes no memory."""
        if self.config.activation_checkpoint.mode == "none":
            return 0
        # imported here, because it takes seconds
        from torchtitan.distributed.activation_checkpoint import apply_ac
        from torchtitan.models.llama3.model.model import Transformer

        from pc_recipe.train.llama2 import model_args_of
        from pc_recipe.train.parallelize import SAVED_OPERATIONS
        from pc_recipe.train.upstream_config import JobConfig

        with FakeTensorMode():
            model = Transformer(model_args_of(self.config))
            tokens = torch.zeros(1, self.config.training.seq_len, dtype=torch.long)
            without = _counted(lambda: model(tokens).sum().backward())
            apply_ac(model, JobConfig(self.config).activation_checkpoint, op_sac_save_list=SAVED_OPERATIONS)
            return self.batches.sequences * (_counted(lambda: model(tokens).sum().backward()) - without)


def assume_tflops(width: int) -> float:
    """TFLOP/s of an H100: 40 % of its peak for wide models, less where matrices are too narrow. Not measured."""
    return min(400.0, 0.27 * width)


def table(run_cost: RunCost) -> str:
    """The costs of a step as a Markdown table."""
    cost, config, ranks = run_cost.step_cost(), run_cost.config, run_cost.batches.dims.world_size
    note = "" if config.pc.enable else " (this config has PC off; the figures assume it is on)"
    operations = [
        ("model, attention counted causally", cost.model, "100 %"),
        ("model, attention counted fully", cost.model_full_square, ""),
        ("repeated by activation checkpointing", cost.recomputed, _percent(cost.recomputed / cost.model)),
        ("PC, whole job", cost.pc, _percent(cost.pc / cost.model)),
        (
            "PC, on the busiest rank",
            cost.pc_busiest,
            f"{_percent(cost.pc_busiest * ranks / cost.model)} of that rank's",
        ),
    ]
    rows = [(what, f"{flops / 1e15:.4g}", share) for what, flops, share in operations]
    rows.append(("paper's bound", "", _percent(cost.paper_bound)))
    bound = (
        "The paper's bound counts one forward and one backward evaluation of PC per step in the whole job, "
        "relative to the preconditioned matrices' own matmuls.\n"
    )
    return (
        f"{run_cost.parameters / 1e6:,.1f} M parameters, {ranks} GPUs, {run_cost.tokens:,} tokens per step in {run_cost.batches.micro_batches} "
        f"micro-batches of {config.training.local_batch_size} x {config.training.seq_len} per rank, PC: "
        f"{describe_pc(config.pc.pc_config)}{note}\n\n"
        + markdown.table(("operations per step", "PFLOP", "of the model's"), rows)
        + f"\n{bound}FLOPs are not time: PC's matmuls run in pc.compute_dtype or float32, the model's in bfloat16.\n"
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"

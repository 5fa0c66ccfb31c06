"""The cost of a step: FLOPs of the model and of PC, and memory by part.

A matmul of [a, b] and [b, c] counts as 2abc FLOPs; elementwise operations are not counted, as in the paper's appendix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torchtitan.models.llama3.model.model import Transformer

from pc import attach, named_weights, polynomial
from pc.config import PCConfig
from pc.owner import assign
from pc.settings import load_config
from pc.settings.layout import Layout
from pc.titan import memory
from pc.titan.llama2 import Llama2Args, model_args_of


@dataclass(frozen=True)
class Matrix:
    """A preconditioned weight of shape [n, m] with its settings."""

    n: int
    m: int
    config: PCConfig

    @property
    def long(self) -> int:
        return max(self.n, self.m)

    @property
    def short(self) -> int:
        return min(self.n, self.m)

    @property
    def stages(self) -> tuple[polynomial.Coefficients, ...]:
        return polynomial.stages(polynomial.resolve(self.config.level))

    def polynomial_flops(self) -> int:
        """One evaluation of g(W): the Gram matrix, p of it, and the matmul with W.

        The paper counts 4 l s^2 + 2 (k-1) s^3, for Horner's rule.
        """
        return sum(self._stage_flops(stage) for stage in self.stages)

    def _stage_flops(self, stage: polynomial.Coefficients) -> int:
        return 4 * self.long * self.short**2 + 2 * _square_products(len(stage) - 1) * self.short**3

    def power_iteration_flops(self) -> int:
        """Schedule "forward": two matrix-vector products in each of q steps."""
        return 4 * self.config.power_iterations * self.n * self.m

    def power_iteration_by_gram_flops(self) -> int:
        """Schedule "step": q - 1 matrix-vector products with the Gram matrix, which PC needs anyway, two with W."""
        return 2 * (self.config.power_iterations - 1) * self.short**2 + 4 * self.n * self.m

    def estimate_flops(self) -> int:
        """u^T W v."""
        return 2 * self.n * self.m

    def materialise_flops(self) -> int:
        """Schedule "step", once per optimizer step: power iteration, then PC(W)."""
        return self.power_iteration_by_gram_flops() + self.estimate_flops() + self.polynomial_flops()

    def pull_back_flops(self) -> int:
        """Schedule "step", once per optimizer step, by `polynomial.vjp`: p again, and its backward pass.

        Each stage takes 4 matmuls of [s, s] and [s, l] and, if p takes c matmuls of [s, s], 3 c - 1 of these. All
        stages but the last are evaluated first.
        """
        long, short = self.long, self.short
        backward = 0
        for stage in self.stages:
            squares = _square_products(len(stage) - 1)
            backward += 8 * long * short**2 + 2 * max(0, 3 * squares - 1) * short**3
        return backward + sum(self._stage_flops(stage) for stage in self.stages[:-1]) + self.estimate_flops()

    def step_flops(self) -> int:
        """Schedule "step", once per optimizer step."""
        return self.materialise_flops() + self.pull_back_flops()

    def in_graph_flops(self, recomputed: bool) -> int:
        """Schedule "forward", per micro-batch and rank; activation checkpointing repeats the forward pass."""
        forward = self.polynomial_flops() + self.estimate_flops()
        backward = 2 * self.polynomial_flops() + self.estimate_flops()
        return (2 if recomputed else 1) * forward + backward

    def kept_elements(self) -> int:
        """Elements that autograd keeps in schedule "forward" between a forward and its backward pass.

        [n, m]: the normalised weight, the polynomial's result and PC(W). [s, s]: the partial sums of
        p(G), the Gram matrix if it is squared, and its square if that is used again.
        """
        products = [_square_products(len(stage) - 1) for stage in self.stages]
        squares = sum(max(1, count) + (count > 0) + (count > 1) for count in products)
        return (len(self.stages) + 2) * self.n * self.m + squares * self.short**2

    def paper_bound(self, tokens: int) -> float:
        """The paper's bound ((k + 1) s + 2 q + 1) / B on PC's FLOPs relative to the matrix's own 6nmB, B = `tokens`."""
        terms = sum(len(stage) for stage in self.stages)
        return (terms * self.short + 2 * self.config.power_iterations + 1) / tokens


def _square_products(degree: int) -> int:
    """Matmuls of [s, s] matrices in p(G) of this degree."""
    return 0 if degree == 1 else math.ceil(degree / 2)


def model_flops_per_token(args: Llama2Args, seq_len: int, *, causal: bool) -> float:
    """FLOPs of the forward and backward pass per token, without recomputation.

    Args:
        causal: count only the lower triangle of attention, as a kernel that skips the rest computes. TorchTitan
            counts the full square for its MFU.
    """
    with torch.device("meta"):
        model = Transformer(args)
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    square = 12 * args.n_layers * args.dim * seq_len  # scores, and their matmul with values; twice in backward
    return 6 * matrices + (square / 2 if causal else square)


@dataclass(frozen=True)
class StepCost:
    """FLOPs of one optimizer step."""

    tokens: int
    micro_batches: int
    """per rank"""
    ranks: int
    model: float
    """whole job, attention counted causally"""
    model_full_square: float
    """whole job, attention counted fully"""
    pc_step: int
    """PC in schedule "step", whole job"""
    pc_step_busiest: int
    """PC in schedule "step", on the rank with the most"""
    pc_forward: int
    """PC in schedule "forward", whole job"""
    paper_bound: float
    """largest over matrices, B = tokens of the global batch"""


class Plan:
    """A config on `world_size` GPUs.

    Raises:
        UserError: the config does not resolve, or does not fit the number of GPUs.
    """

    def __init__(self, path: str | Path, overrides: Sequence[str], world_size: int) -> None:
        self.config = load_config(path, overrides)
        self.world_size = world_size
        layout = Layout.of(self.config, world_size)
        self.dims = layout.dims
        self.tensor_parallel, self.pipeline_parallel = layout.dims.tp, layout.dims.pp
        self.replicas, self.shards = layout.dims.dp_replicate, layout.shards
        self.micro_batches, self.tokens = layout.micro_batches, layout.tokens
        self.args = model_args_of(self.config)
        with torch.device("meta"):
            self.model = attach(Transformer(self.args), self.config.pc.to_pc_config())
        self.forms = [weight.form for _, weight in named_weights(self.model)]
        self.matrices = [Matrix(*matrix) for form in self.forms for matrix in form.matrices]

    @cache
    def step_cost(self) -> StepCost:
        """FLOPs of one step; counts PC even if the config has it off."""
        seq_len = self.config.training.seq_len
        per_weight = [sum(Matrix(*matrix).step_flops() for matrix in form.matrices) for form in self.forms]
        num_owners = self.shards * self.tensor_parallel
        load = [0] * num_owners
        for flops, owner in zip(per_weight, assign([form.cost for form in self.forms], num_owners), strict=True):
            load[owner] += flops
        recomputed = self.config.activation_checkpoint.mode == "full"
        in_graph = sum(matrix.in_graph_flops(recomputed) for matrix in self.matrices)
        power = sum(matrix.power_iteration_flops() for matrix in self.matrices)
        ranks = self.world_size // self.pipeline_parallel  # a pipeline stage evaluates only its own matrices
        return StepCost(
            tokens=self.tokens,
            micro_batches=self.micro_batches,
            ranks=self.world_size,
            model=self.tokens * model_flops_per_token(self.args, seq_len, causal=True),
            model_full_square=self.tokens * model_flops_per_token(self.args, seq_len, causal=False),
            pc_step=sum(per_weight) * self.replicas,  # every replica repeats the work
            pc_step_busiest=math.ceil(max(load) / self.pipeline_parallel),
            pc_forward=ranks * (self.micro_batches * in_graph + power),
            paper_bound=max(matrix.paper_bound(self.tokens) for matrix in self.matrices),
        )

    def memory_by_part(self, schedule: str) -> dict[str, float]:
        """GiB per GPU at the peak, by part; `schedule` is "step", "forward", or "plain" for the baseline.

        The passes of "step" need less: they run when the activations are freed.
        """
        training = self.config.training
        parts = memory.of_run(self.config, self.dims, memory.sizes_of(self.model), schedule=schedule)
        if schedule == "forward":
            kept = sum(matrix.kept_elements() for matrix in self.matrices) / self.pipeline_parallel
            if self.config.activation_checkpoint.mode == "full":
                kept /= self.args.n_layers
            itemsize = memory.BFLOAT16 if training.mixed_precision_param == "bfloat16" else memory.FLOAT32
            parts["PC in the graph"] = kept * itemsize / memory.GIB
        return parts


def table(plan: Plan) -> str:
    """The plan's costs as Markdown tables."""
    cost, parallel = plan.step_cost(), plan.config
    share = cost.model / cost.ranks
    level = parallel.pc.level
    note = "" if parallel.pc.enable else " (this config has PC off; the figures assume it is on)"
    text = [
        f"{parallel.model.flavor}, {cost.ranks} GPUs, {cost.tokens:,} tokens per step in "
        f"{cost.micro_batches} micro-batches of {parallel.training.local_batch_size} x "
        f"{parallel.training.seq_len} per rank, PC level {level}{note}",
        "",
        "| operations per step | PFLOP | of the model's |",
        "|---|---|---|",
        f"| model, attention counted causally | {cost.model / 1e15:.4g} | 100 % |",
        f"| model, attention counted fully | {cost.model_full_square / 1e15:.4g} | |",
        f'| PC, schedule "step", whole job | {cost.pc_step / 1e15:.4g} | {_percent(cost.pc_step / cost.model)} |',
        f'| PC, schedule "step", on the busiest rank | {cost.pc_step_busiest / 1e15:.4g} | '
        f"{_percent(cost.pc_step_busiest / share)} of that rank's |",
        f'| PC, schedule "forward", whole job | {cost.pc_forward / 1e15:.4g} | '
        f"{_percent(cost.pc_forward / cost.model)} |",
        f"| paper's bound | | {_percent(cost.paper_bound)} |",
        "",
        "The paper's bound counts one forward and one backward evaluation of PC per step in the whole job, "
        "relative to the preconditioned matrices' own matmuls.",
        "FLOPs are not time: PC's matmuls run in pc.compute_dtype, the model's in bfloat16.",
        "",
        "| GiB per GPU | baseline | step | forward |",
        "|---|---|---|---|",
    ]
    columns = [plan.memory_by_part(schedule) for schedule in ("plain", "step", "forward")]
    for part in dict.fromkeys(part for column in columns for part in column):
        text.append(f"| {part} | " + " | ".join(f"{column.get(part, 0.0):.2f}" for column in columns) + " |")
    text.append("| peak | " + " | ".join(f"{sum(column.values()):.2f}" for column in columns) + " |")
    return "\n".join(text) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"

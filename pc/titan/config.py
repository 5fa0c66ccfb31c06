# No `from __future__ import annotations` here: TorchTitan needs the fields' real types to merge these classes.
"""TorchTitan's JobConfig with the sections [pc], [data], [health] and [evaluation]."""

from dataclasses import asdict, dataclass, field
from typing import Literal

import torchtitan.config.job_config as titan

from pc.config import PCConfig
from pc.titan.health import Health
from pc.titan.optimizer_kinds import Optimizer


@dataclass
class PC:
    """Polynomial weight preconditioning (see `pc.PCConfig`)."""

    enable: bool = False
    """Precondition weights. false trains a plain Llama 2, the baseline."""

    level: int | str | list[float] | dict[str, int | str | list[float]] = 4
    """Strength: 1 to 4, or "polar_express"; or your own coefficients, such as [2.083, -1.643, 0.560]; or a table with
    one of these for each entry of blocks."""

    blocks: list[str] = field(default_factory=lambda: ["o", "ffn"])
    """Layers to precondition: q, k, v, o, gate, up, down, and the groups qk and ffn."""

    power_iterations: int = 10
    """Power iterations per optimizer step for the estimate of the spectral norm."""

    norm_recovery: bool = True
    """Multiply by the estimated spectral norm after the polynomial."""

    learnable_gamma: bool = True
    """Multiply by one learnable scalar per matrix."""

    schedule: Literal["step", "forward"] = "step"
    """When to compute PC(W): once per optimizer step, or in every forward pass inside the autograd graph."""

    compute_dtype: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of the polynomial's matmuls. In schedule "step" the raw weight and all other PC computations are
    float32; in "forward" FSDP casts the weight to training.mixed_precision_param first."""

    start: Literal["preserve", "raw"] = "preserve"
    """How to use the initial weights of a new run (checkpoint.initial_load_path, initial_load_in_hf): "preserve": as
    PC(W), so that the model starts with the same function; "raw": as W."""

    def to_pc_config(self) -> PCConfig:
        """The validated `PCConfig`; raises UserError."""
        values = asdict(self)
        del values["enable"], values["start"]
        return PCConfig(**values)


@dataclass
class Data:
    """Where tokens come from (see docs/data.md)."""

    path: str = "data/demo"
    """Folder of token shards with a manifest."""

    validation_path: str = ""
    """Folder of the validation split; empty: the same as path."""

    validation_sequences: int = 64
    """Sequences per validation over all ranks, the same ones every time."""

    seed: int = 0
    """Seed of the order of training sequences."""

    skip: list[str] = field(default_factory=list)
    """Training sequences to skip, by the positions shown in the log: "1200-1263"."""


@dataclass
class Model(titan.Model):
    """TorchTitan's section plus the vocabulary size."""

    name: str = "pc_llama2"
    """Train spec: pc_llama2."""

    flavor: str = "debug"
    """Model size: regime, nano, debug, 60M, 271M, 1B, 7B, 13B or 70B."""

    vocab_size: int = 32_000
    """Rows of the embedding and the output head; at least the tokenizer's vocabulary size."""

    init_std: float = 0.02
    """Standard deviation of the blocks' initial weights; wo, w2 and w3 are divided by sqrt(2 (layer + 1)) on top."""


@dataclass
class Training(titan.Training):
    """TorchTitan's section plus chunked loss and the limit on non-finite steps."""

    max_nonfinite_steps: int = 3
    """Steps with a non-finite loss or gradient norm do not change the weights; stop after this many in a row."""

    chunked_loss: bool = False
    """Compute the head and cross entropy in chunks of tokens, without full logits; saves memory."""


@dataclass
class Parallelism(titan.Parallelism):
    """TorchTitan's section plus how often FSDP gathers weights and reduces gradients."""

    fsdp_sync: Literal["auto", "step", "replicas_per_step", "micro_batch"] = "auto"
    """"step": all-gather weights and reduce-scatter gradients once per optimizer step. "micro_batch": for every
    micro-batch, as TorchTitan does. "replicas_per_step": the same, but the all-reduce among replicas once per step.
    "auto": "step" if the memory estimate fits the device, otherwise "replicas_per_step"."""


@dataclass
class Checkpoint(titan.Checkpoint):
    """TorchTitan's section plus `keep_every`."""

    keep_every: int = 0
    """Besides the newest keep_latest_k, keep checkpoints of multiples of this step; 0 is off."""


Task = Literal[
    "lambada_openai", "hellaswag", "winogrande", "piqa", "boolq", "arc_easy", "arc_challenge", "commonsense_qa",
    "openbookqa",
]  # fmt: skip


@dataclass
class Evaluation:
    """Zero-shot scores during training (see docs/evaluation.md)."""

    interval: int = 0
    """Steps between evaluations; 0 is never."""

    tasks: list[Task] = field(default_factory=lambda: ["lambada_openai", "piqa", "arc_easy"])
    """Tasks to score, out of the nine."""

    limit: int = 200
    """Items per task; 0 is all."""

    data: str = ""
    """Folder of the tasks as JSON lines; empty: download from the Hub."""


@dataclass
class JobConfig(titan.JobConfig):
    """All sections."""

    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    parallelism: Parallelism = field(default_factory=Parallelism)
    pc: PC = field(default_factory=PC)
    data: Data = field(default_factory=Data)
    health: Health = field(default_factory=Health)
    evaluation: Evaluation = field(default_factory=Evaluation)

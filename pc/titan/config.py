# No `from __future__ import annotations` here: TorchTitan merges these classes by their fields' real types.
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
    """Precondition weights. Off: the same trainer trains a plain Llama 2, the baseline."""

    level: int | str | list[float] | dict[str, int | str | list[float]] = 4
    """Strength: 1 to 4, or "polar_express"; or coefficients of one's own map, such as [2.083, -1.643, 0.560]; or a table
    with one for each entry of blocks."""

    blocks: list[str] = field(default_factory=lambda: ["o", "ffn"])
    """Layers to precondition: q, k, v, o, gate, up, down, and the groups qk and ffn."""

    power_iterations: int = 10
    """Power-iteration steps per optimizer step that estimate the spectral norm."""

    norm_recovery: bool = True
    """Multiply by the estimated spectral norm again after the polynomial."""

    learnable_gamma: bool = True
    """Multiply by a learnable scalar per matrix."""

    schedule: Literal["step", "forward"] = "step"
    """When PC(W) is evaluated: once per optimizer step, or in every forward pass inside the graph."""

    compute_dtype: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of the polynomial's matrix products. In schedule "step" the raw weight and all else of PC are
    float32; in "forward" FSDP hands the layer weights of training.mixed_precision_param."""

    start: Literal["preserve", "raw"] = "preserve"
    """What weights mean that a new run starts from (checkpoint.initial_load_path, initial_load_in_hf): "preserve": what
    PC(W) is, so that the first step's function is theirs; "raw": W."""

    def to_pc_config(self) -> PCConfig:
        """The method's own configuration, checked; raises UserError."""
        values = asdict(self)
        del values["enable"], values["start"]
        return PCConfig(**values)


@dataclass
class Data:
    """Where tokens come from (see docs/data.md)."""

    path: str = "data/demo"
    """Folder of token shards with a manifest."""

    validation_path: str = ""
    """Another folder to take the validation split from; empty: the same."""

    validation_sequences: int = 64
    """Sequences to validate on, the same ones every time, over all ranks."""

    seed: int = 0
    """Order of the training sequences."""

    skip: list[str] = field(default_factory=list)
    """Training sequences to leave out, by the positions that the log gives: "1200-1263"."""

    streaming: str = ""
    """For a quick look: a Hub dataset, "name" or "name:subset", tokenised while training instead of `path`."""

    tokenizer: str = ""
    """Tokenizer for streaming: a Hugging Face folder, a SentencePiece model or a tiktoken encoding; empty: the
    default one. Shards know theirs."""


@dataclass
class Model(titan.Model):
    """TorchTitan's section, with the size of the vocabulary."""

    name: str = "pc_llama2"
    """Train spec; this project's is pc_llama2."""

    flavor: str = "debug"
    """Size: nano, debug, 60M, 271M or 1B."""

    vocab_size: int = 32_000
    """Rows of the embedding and of the output head; at least the tokenizer's entries."""


@dataclass
class Training(titan.Training):
    """TorchTitan's section, with the loss in chunks."""

    max_nonfinite_steps: int = 3
    """A step whose loss or gradient norm is not finite is left out of the weights; stop after so many in a row."""

    chunked_loss: bool = False
    """Head and cross entropy a chunk of tokens at a time, without full logits: less memory."""


@dataclass
class Parallelism(titan.Parallelism):
    """TorchTitan's section, with how often FSDP exchanges weights and gradients."""

    fsdp_sync: Literal["auto", "step", "replicas_per_step", "micro_batch"] = "auto"
    """Gather weights and reduce gradients once per optimizer step ("step"), with every micro-batch ("micro_batch",
    TorchTitan's way), or with every micro-batch but among replicas once per step ("replicas_per_step"). "auto": once
    per step where the memory estimate fits the device, otherwise "replicas_per_step"."""


@dataclass
class Checkpoint(titan.Checkpoint):
    """TorchTitan's section, with checkpoints that stay."""

    keep_every: int = 0
    """Beside the newest keep_latest_k, keep the checkpoint of every so many steps; 0 is none."""


@dataclass
class Evaluation:
    """Zero-shot scores while training (see docs/evaluation.md)."""

    interval: int = 0
    """Score every so many steps; 0 is never."""

    tasks: list[str] = field(default_factory=lambda: ["lambada_openai", "piqa", "arc_easy"])
    """Tasks of the nine to score."""

    limit: int = 200
    """Items per task; 0 is all."""

    data: str = ""
    """Folder of the tasks as JSON lines; empty: from the Hub."""


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

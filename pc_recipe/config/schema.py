"""Every key of a run's configuration: its type, range, default, description, and what it decides. PC's keys are in
`pc_section`, the optimizers' in `optimizers`, the model's in `model_sizes`.

Sections and keys have TorchTitan's names. TorchTitan's keys that this trainer does not read are left out.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from pc_recipe.config.model_sizes import Model
from pc_recipe.config.optimizers import OptimizerSection
from pc_recipe.config.pc_section import PC
from pc_recipe.config.sections import (
    RESULT,
    Auto,
    Count,
    Fraction,
    Interval,
    Positive,
    Section,
    Seed,
    Text,
    key,
    should,
)

INSTEAD = {
    "checkpoint.folder": "job.dump_folder",
    "checkpoint.last_save_in_hf": "scripts/export_hf.py",
    "model.hf_assets_path": "checkpoint.initial_load_path",
    "model.tokenizer_path": "data.path, whose shards know their tokenizer",
    "parallelism.fsdp_reshard_after_forward": "parallelism.fsdp_sync",
    "training.dataset": "data.path",
    "training.dataset_path": "data.path",
    "training.dtype": "training.mixed_precision_param; W is float32",
    "validation.dataset": "data.validation_path",
    "validation.dataset_path": "data.validation_path",
    "validation.steps": "data.validation_sequences",
}
"""{key of TorchTitan that this trainer does not read: what to set instead}"""
GONE = {
    "checkpoint.export_dtype": "scripts/export_hf.py --dtype writes weights of another precision",
    "comm.trace_buf_size": "the flight recorder keeps 20,000 events",
    "optimizer.muon_adjust_lr": "Muon scales its rate as match_rms_adamw",
    "optimizer.muon_nesterov": "Muon has Nesterov momentum",
    "optimizer.muon_steps": "Muon takes 5 Newton-Schulz steps",
}
"""{key of earlier versions: what holds without it}"""
HOLDS = {
    "optimizer.muon_adjust_lr": "match_rms_adamw",
    "optimizer.muon_nesterov": True,
    "optimizer.muon_steps": 5,
}
"""{key of `GONE` that decided a result: its value that holds now}"""


class Job(Section):
    dump_folder: Text = key("", "Folder of the run; empty: outputs/<name of the config's file>.")
    description: Text = key("default job", "One line of description.")


class Profiling(Section):
    enable_profiling: bool = key(False, "Write traces of torch's profiler.")
    profile_freq: Count = key(10, "Steps between traces.")
    profiler_active: Count = key(1, "Steps in a trace.")
    profiler_warmup: Interval = key(3, "Steps before a trace in which the profiler warms up.")
    enable_memory_snapshot: bool = key(False, "Write snapshots of the GPU's memory.")


class Metrics(Section):
    log_freq: Count = key(10, "Steps between lines of the log and of metrics.jsonl.")
    enable_tensorboard: bool = key(False, "Write TensorBoard logs.")
    enable_wandb: bool = key(False, "Log to Weights & Biases; WANDB_PROJECT and WANDB_RUN_NAME name the page.")


class LRScheduler(Section):
    decides = RESULT
    warmup_steps: Interval = key(200, "Steps of linear warmup.")
    total_steps: Count | None = key(
        None, "Steps of the whole schedule, after which the rate stays constant; unset: training.steps."
    )
    decay_ratio: Fraction | None = key(
        None,
        "Share of the steps that decay, at the end; the first of them has the peak rate. Unset: all after the warmup.",
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = key(
        "linear",
        "Shape of the decay: at share t of its steps linear is 1 - t, sqrt 1 - t^0.5, cosine (1 + cos(pi t)) / 2.",
    )
    min_lr_factor: Fraction = key(
        0.0,
        "Share of the peak at which the decay ends, one step behind the last: a linear one has gone 1 - 1/steps of its way.",
    )


class DataLoader(Section):
    pin_memory: bool = key(False, "Copy batches to pinned memory first.")


class Training(Section):
    decides = RESULT
    local_batch_size: Auto = key(
        8, "Sequences per micro-batch and rank; -1: the most that divide global_batch_size and fit the GPU.", "run"
    )
    global_batch_size: Auto = key(-1, "Sequences per optimizer step over all ranks; -1: a micro-batch per rank.")
    seq_len: Count = key(2048, "Tokens per sequence.")
    max_norm: Positive = key(1.0, "Gradients are clipped to this norm.")
    steps: Count = key(10_000, "Optimizer steps.")
    mixed_precision_param: Literal["bfloat16", "float32"] = key("bfloat16", "Precision of the model's matmuls.")
    gc_freq: Count = key(50, "Steps between Python's garbage collections.", "run")
    dataloader: DataLoader = DataLoader()
    max_nonfinite_steps: Count = key(
        3, "A step with a non-finite loss or gradient norm changes no weight; stop after this many in a row.", "run"
    )


PipelineSchedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
"""Without TorchTitan's DualPipeV, which overlaps the exchanges of experts, and needs a GPU."""


class Parallelism(Section):
    data_parallel_replicate_degree: Count = key(1, "Replicas of the sharded weights (HSDP).")
    data_parallel_shard_degree: Auto = key(-1, "Ranks that shard the weights (FSDP); -1: all that remain.")
    fsdp_sync: Literal["step", "micro_batch"] = key(
        "step", "Gather weights and reduce gradients once per step, or for every micro-batch, which takes less memory."
    )
    tensor_parallel_degree: Count = key(1, "Ranks that share each matrix.")
    pipeline_parallel_degree: Count = key(1, "Stages of the pipeline.")
    pipeline_parallel_schedule: PipelineSchedule = key("1F1B", "Name of one of torch's pipeline schedules.")
    pipeline_parallel_microbatch_size: Count = key(1, "Sequences that pass through the pipeline together.")
    context_parallel_degree: Count = key(1, "Ranks that share each sequence.")

    @property
    def syncs_once_per_step(self) -> bool:
        """Whether all is gathered and reduced once per step. In a pipeline, torch's schedules decide."""
        return self.fsdp_sync == "step" and self.pipeline_parallel_degree == 1


State = Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state", "method"]


class Checkpoint(Section):
    enable: bool = key(False, "Save checkpoints, and continue from the newest one.")
    interval: Count = key(500, "Steps between checkpoints.")
    minutes: Interval = key(0, "Minutes since a checkpoint after which the next is saved early; 0: never.")
    initial_load_path: Text | None = key(None, "Checkpoint or Hugging Face folder that a new run starts from.", RESULT)
    initial_load_model_only: bool = key(True, "Load only its weights.", RESULT)
    initial_load_in_hf: bool = key(False, "initial_load_path is a Hugging Face folder.", RESULT)
    initial_load_tokenizer_is_the_same: bool = key(
        False, "Do not compare the tokenizer of initial_load_path with that of the data: for a folder that has none."
    )
    last_save_model_only: bool = key(True, "The last checkpoint holds only weights; it cannot be resumed.")
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = key("disabled", "Save while training goes on.")
    keep_latest_k: Interval = key(10, "Newest checkpoints to keep, two or more; 0: all.")
    keep_every: Interval = key(0, "Steps between extra checkpoints that are kept for good; 0: none.")
    exclude_from_loading: list[State] = key(
        [],
        'Parts of the checkpoint in initial_load_path that are not loaded: with ["dataloader"], and not initial_load_model_only, '
        "a run goes on with other data from the weights and the optimizer's states, as in an annealing phase.",
        RESULT,
    )


class ActivationCheckpoint(Section):
    mode: Literal["selective", "full", "none"] = key("selective", "What the backward pass recomputes.")
    selective_ac_option: Annotated[str, StringConstraints(pattern=r"^(op|[0-9]{1,9})$")] = key(
        "2", "For selective: op recomputes all but costly operations, a number n every n-th block."
    )


class Compile(Section):
    enable: bool = key(False, "Compile with torch.compile.")
    components: list[Literal["model", "loss"]] = key(["model", "loss"], "What is compiled; model: each block.")
    backend: Literal["inductor", "aot_eager", "eager", "cudagraphs"] = key("inductor", "Backend of torch.compile.")


class Float8(Section):
    decides = RESULT
    enable_fsdp_float8_all_gather: bool = key(False, "Gather weights in float8.")
    precompute_float8_dynamic_scale_for_fsdp: bool = key(False, "Compute all scales at once after a step.")
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = key(None, "torchao's recipe.")
    filter_fqns: list[str] = key([], "Layers with one of these in their name are not converted.")
    emulate: bool = key(False, "Emulate float8 on hardware without it; slow.")


class QuantizedLinear(Section):
    float8: Float8 = Float8()


class Quantize(Section):
    linear: QuantizedLinear = QuantizedLinear()


class Comm(Section):
    init_timeout_seconds: Count = key(300, "Longest wait for other ranks until the first step is done.")
    train_timeout_seconds: Count = key(
        100, "Longest wait for other ranks later; set it longer than writing a checkpoint takes."
    )


class Validation(Section):
    decides = RESULT
    enable: bool = key(False, "Validate, also after the last step.")
    freq: Count = key(10, "Steps between validations.")
    local_batch_size: Auto = key(8, "Sequences per batch and rank; -1: as training.local_batch_size.", "run")


class Debug(Section):
    decides = RESULT
    seed: Seed = key(0, "Seed of the initial weights.")
    deterministic: bool = key(False, "Use only operations that always give the same bits.", "run")


class Data(Section):
    """Where tokens come from (docs/own-text.md)."""

    decides = RESULT
    path: Annotated[
        Text | Annotated[dict[Text, Positive], Field(min_length=1)],
        should("a folder or a table of folders with weights above 0"),
    ] = key("data/demo", "Folder of token shards with a manifest; or a mixture, a table of folders with their weights.")
    validation_path: Text = key("", "Folder of the validation split; empty: the same as path.")
    validation_sequences: Count = key(64, "Sequences per validation over all ranks, the same ones every time.")
    seed: Seed = key(0, "Seed of the order of training sequences.")
    max_epochs: Count = key(
        100,
        "Most passes over the training data; a run that would make more, such as with a wrong folder, is refused.",
        "run",
    )
    skip: list[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,18}(-[0-9]{1,18})?$")]] = key(
        [], 'Training sequences to skip, by the positions shown in the log: "1200-1263".'
    )

    @property
    def folders(self) -> dict[str, float]:
        """{folder: weight} of the training data."""
        return self.path if isinstance(self.path, dict) else {self.path: 1.0}

    @property
    def validation_folders(self) -> dict[str, float]:
        """{folder: weight of its loss} of the validation data."""
        return {self.validation_path: 1.0} if self.validation_path else self.folders


class Diagnostics(Section):
    freq: Interval = key(
        10, "Steps between measurements of output sizes, gamma and the weight norm, also in the last step; 0: never."
    )
    spectra_freq: Interval = key(
        500,
        "Steps between measurements of every matrix's condition number and the error of PC's norm estimate, also in the last step; 0: never.",
    )


class Experiment(Section):
    """An arm of a study that no other key describes (`pc_recipe.train.arm`)."""

    decides = RESULT
    arm: Annotated[str, StringConstraints(pattern=r"^([\w.]+:\w+)?$")] = key(
        "", "A class that is called around every optimizer step, as module:Class; this line makes a run import it."
    )
    options: dict[str, Any] = key({}, "Arguments of the class. If one names a file, its content counts too.")


class Config(Section):
    """All sections."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: OptimizerSection = OptimizerSection()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()
    pc: PC = PC()
    data: Data = Data()
    diagnostics: Diagnostics = Diagnostics()
    experiment: Experiment = Experiment()
    _origin: str = (
        ""  # comments that name the files and overrides that it was read from (`pc_recipe.config.inheritance`)
    )

    @property
    def folder(self) -> Path:
        """The run's folder (`pc_recipe.files.run_folder`)."""
        return Path(self.job.dump_folder)

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss is compiled: not on logits that tensor parallelism shards.

        Torch 2.13 compiles such a loss correctly only the first time. Loaded from the compiler's cache, by this process or
        a later one, the loss is silently wrong.
        """
        is_whole = self.parallelism.tensor_parallel_degree == 1
        return self.compile.enable and "loss" in self.compile.components and is_whole

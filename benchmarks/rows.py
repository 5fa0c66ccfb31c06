"""What `step.py` measures: variants of the trainer, and the goals for their figures."""

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    """One trainer: a config of `train_configs` with overrides."""

    config: str
    overrides: tuple[str, ...] = ()
    stock: bool = False
    """TorchTitan's own trainer, parallelisation, optimizers and initialisation, with the same model sizes"""
    compile_pc: bool = False
    """pull-back and materialise through torch.compile, which the project itself does not do"""
    finite_check: bool = True
    """whether each step's loss and gradients are checked to be finite, as the trainer always does"""
    attention: str = ""
    """the only allowed kernel of scaled dot product attention (a name of SDPBackend); if empty, TorchTitan's order"""


@dataclass(frozen=True)
class Goal:
    figure: str
    """key of the row's figures"""
    relation: str
    """"<=" or ">=" """
    limit: float


@dataclass(frozen=True)
class Row:
    about: str
    variants: dict[str, Variant]
    micro_batches: int = 10
    rounds: int = 5
    processes: int = 1
    """minimum number of processes, under torchrun"""
    goals: tuple[Goal, ...] = ()
    shape: dict[str, int | str] = field(default_factory=dict)
    """flavor, seq_len, local_batch_size that differ from the config's"""


ADAMW, PC = "1b_adamw_baseline.toml", "1b_adamw_pc.toml"
DEBUG = "debug.toml"
TF32 = ("--pc.compute_dtype", "tf32")
IN_GRAPH = ("--pc.schedule", "forward", "--pc.compute_dtype", "float32")
EAGER = ("--compile.enable", "false")
FLOAT32 = ("--training.mixed_precision_param", "float32")
FLOAT8 = ("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output")
BY_OPERATION = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
CHUNKED_LOSS = ("--training.chunked_loss", "true")
FULL = ("--activation_checkpoint.mode", "full")
# The parts of PC in the graph cannot be separated if the backward pass recomputes PC(W).
KEEP_ALL = ("--activation_checkpoint.mode", "none")
BASELINE = ("--pc.enable", "false")
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
EVERY_MICRO_BATCH = ("--parallelism.fsdp_sync", "micro_batch")
ONCE = ("--parallelism.fsdp_sync", "step")
SMALL: dict[str, int | str] = {"flavor": "60M", "seq_len": 64, "local_batch_size": 1}

# In order of value, for limited GPU time.
ROWS: dict[str, Row] = {
    "pc": Row(
        "1B, AdamW: PC level 4 over baseline, one GPU owning every matrix",
        {"baseline": Variant(ADAMW), "pc": Variant(PC, TF32)},
        goals=(
            Goal("time pc / baseline", "<=", 1.015),
            Goal("extra peak GiB pc - baseline", "<=", 3.0),
            Goal("PC state GiB per GPU of 8, pc", "<=", 0.4),
            Goal("utilisation baseline", ">=", 0.5),
        ),
    ),
    "paper-batch": Row(
        "the same at the paper's global batch",
        {"baseline": Variant(ADAMW), "pc": Variant(PC, TF32)},
        micro_batches=80,
        rounds=2,
        goals=(Goal("time pc / baseline", "<=", 1.003),),
    ),
    "in-graph": Row(
        "1B, AdamW: PC in every forward pass, compiled",
        {"baseline": Variant(ADAMW), "in graph": Variant(PC, IN_GRAPH)},
        rounds=4,
    ),
    "in-graph-eager": Row(
        "1B, AdamW: PC in every forward pass, not compiled",
        {"baseline": Variant(ADAMW, EAGER + KEEP_ALL), "in graph": Variant(PC, IN_GRAPH + EAGER + KEEP_ALL)},
        rounds=4,
    ),
    "dtype": Row(
        "1B, AdamW, PC level 4: precision of PC's matmuls",
        {
            "tf32": Variant(PC, TF32),
            "float32": Variant(PC, ("--pc.compute_dtype", "float32")),
            "bfloat16": Variant(PC, ("--pc.compute_dtype", "bfloat16")),
        },
        rounds=4,
    ),
    "compiled-pc": Row(
        "1B, AdamW: pull-back and materialise through torch.compile",
        {"pc": Variant(PC, TF32), "compiled": Variant(PC, TF32, compile_pc=True)},
        rounds=4,
    ),
    "stock": Row(
        "1B, AdamW: this project's baseline over TorchTitan 0.2.2's own",
        {"stock": Variant(ADAMW, stock=True), "baseline": Variant(ADAMW)},
        goals=(Goal("time baseline / stock", "<=", 1.0), Goal("utilisation baseline", ">=", 0.5)),
    ),
    "muon": Row(
        "1B: Muon over AdamW, and PC level 2 over Muon",
        {
            "adamw": Variant(ADAMW),
            "muon": Variant("1b_muon_baseline.toml"),
            "muon pc": Variant("1b_muon_pc.toml", TF32),
        },
        rounds=4,
        goals=(Goal("time muon / adamw", "<=", 1.02), Goal("time muon pc / muon", "<=", 1.01)),
    ),
    "attention": Row(
        "1B, AdamW, baseline: only FlashAttention 2 over TorchTitan's choice, which is cuDNN if available",
        {"default": Variant(ADAMW), "flash": Variant(ADAMW, attention="FLASH_ATTENTION")},
        rounds=4,
    ),
    "checkpointing": Row(
        "1B, AdamW, baseline: activation checkpointing by operation, as in the configs, and of whole blocks, over none",
        {"none": Variant(ADAMW, KEEP_ALL), "by operation": Variant(ADAMW, BY_OPERATION), "full": Variant(ADAMW, FULL)},
        rounds=4,
    ),
    "loss": Row(
        "1B, AdamW, baseline: chunked head and loss over full logits; the chunks' backward pass counts as forward",
        {"whole": Variant(ADAMW), "chunked": Variant(ADAMW, CHUNKED_LOSS)},
        rounds=4,
    ),
    "float8": Row(
        "1B, AdamW, PC level 4: all layers but the head multiply in float8 (torchao, tensorwise)",
        {"bfloat16": Variant(PC, TF32), "float8": Variant(PC, TF32 + FLOAT8)},
        rounds=4,
    ),
    "271m": Row(
        "271M, AdamW: PC level 4 over baseline",
        {"baseline": Variant("271m_adamw_baseline.toml"), "pc": Variant("271m_adamw_pc.toml", TF32)},
        micro_batches=5,
    ),
    "exchange": Row(
        "1B, AdamW, baseline, on all GPUs of a machine: weights gathered and gradients reduced once per step over once per "
        "micro-batch",
        {"every micro-batch": Variant(ADAMW, EVERY_MICRO_BATCH), "once": Variant(ADAMW, ONCE)},
        processes=2,
        goals=(Goal("time once / every micro-batch", "<=", 1.0),),
    ),
    "stock-cpu": Row(
        "debug model at the default run's shapes, float32, for a CPU: this project's baseline over TorchTitan's own step",
        {
            "stock": Variant(DEBUG, BASELINE, stock=True),
            "every micro-batch": Variant(DEBUG, BASELINE + EVERY_MICRO_BATCH),
            "baseline": Variant(DEBUG, BASELINE),
        },
        micro_batches=8,
        rounds=15,
        goals=(Goal("time baseline / stock", "<=", 1.03),),
    ),
    "stock-cpu-bf16": Row(
        "the same in bfloat16, for which TorchTitan uses autocast on one process",
        {
            "stock": Variant(DEBUG, BASELINE + BFLOAT16, stock=True),
            "every micro-batch": Variant(DEBUG, BASELINE + BFLOAT16 + EVERY_MICRO_BATCH),
            "baseline": Variant(DEBUG, BASELINE + BFLOAT16),
        },
        micro_batches=8,
        rounds=5,
        goals=(Goal("time baseline / stock", "<=", 1.03),),
    ),
    "finite-cpu": Row(
        "debug model at the default run's shapes, float32, for a CPU: with over without the check of finite loss and gradients",
        {"unchecked": Variant(DEBUG, finite_check=False), "checked": Variant(DEBUG)},
        micro_batches=8,
        rounds=15,
        goals=(Goal("time checked / unchecked", "<=", 1.01),),
    ),
    "exchange-cpu": Row(
        "debug model at the default run's shapes, float32, two processes of a CPU: like row exchange",
        {
            "every micro-batch": Variant(DEBUG, BASELINE + EVERY_MICRO_BATCH),
            "once": Variant(DEBUG, BASELINE + ONCE),
        },
        micro_batches=4,
        processes=2,
        rounds=11,
        goals=(Goal("time once / every micro-batch", "<=", 1.0),),
    ),
    "schedules": Row(
        "60M, AdamW, float32, not compiled, short sequences, for a CPU: time of PC itself in both schedules",
        {
            "step": Variant(PC, EAGER + FLOAT32 + KEEP_ALL),
            "in graph": Variant(PC, IN_GRAPH + EAGER + FLOAT32 + KEEP_ALL),
        },
        rounds=3,
        goals=(Goal("time on PC step / in graph", "<=", 0.2),),
        shape=SMALL,
    ),
    "schedules-bf16": Row(
        "the same with the configs' precision: in the graph PC gets FSDP's bfloat16 weights, once per step float32 ones",
        {"step": Variant(PC, EAGER + KEEP_ALL), "in graph": Variant(PC, IN_GRAPH + EAGER + KEEP_ALL)},
        rounds=3,
        shape=SMALL,
    ),
}


def overrides_of(shape: dict[str, int | str]) -> list[str]:
    """The words of `Row.shape` for a config."""
    return [f"--{'model' if key == 'flavor' else 'training'}.{key}={value}" for key, value in shape.items()]


def table(folder: Path) -> str:
    """Every row with its goals, from the JSON files of a folder."""
    lines = ["| row | figure | goal | measured (range) | met |", "|---|---|---|---|---|"]
    for name, row in ROWS.items():
        file = folder / f"{name}.json"
        if not file.is_file():
            for goal in row.goals or (None,):
                wanted = (goal.figure, f"{goal.relation} {goal.limit}") if goal else (row.about, "")
                lines.append(f"| {name} | {wanted[0]} | {wanted[1]} | not run | |")
            continue
        record = json.loads(file.read_text())
        goals = {goal.figure: goal for goal in row.goals} if not record["changed"] else {}
        found = record["figures"]
        for figure in found | goals:
            value, goal = found.get(figure), goals.get(figure)
            wanted = f"{goal.relation} {goal.limit}" if goal else ""
            if value is None:
                lines.append(f"| {name} | {figure} | {wanted} | not measured | |")
                continue
            met = ""
            if goal:
                is_met = value["median"] <= goal.limit if goal.relation == "<=" else value["median"] >= goal.limit
                met = "yes" if is_met else "no"
            text = f"{value['median']:.4g} ({value['smallest']:.4g} to {value['largest']:.4g}, n = {value['n']})"
            lines.append(f"| {name} | {figure} | {wanted} | {text} | {met} |")
    return "\n".join(lines) + "\n"

"""What `step.py` measures: variants of the trainer, and the goals for their figures."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from pc_recipe.pages import markdown


@dataclass(frozen=True)
class Variant:
    """One trainer: a config of `train_configs` with overrides."""

    config: str
    overrides: tuple[str, ...] = ()
    stock: bool = False
    """Use TorchTitan's own trainer, parallelisation, optimizers and initialisation, with the same model sizes."""
    attention: str = ""
    """The only allowed kernel of scaled dot product attention (a name of SDPBackend); empty: TorchTitan's order."""
    in_graph: bool = False
    """PC as the paper's layer, `pc.PCLinear`: in every forward pass."""


@dataclass(frozen=True)
class Goal:
    figure: str
    """Key of the row's figures."""
    relation: str
    """"<=" or ">=" """
    limit: float

    def is_met(self, value: float) -> str:
        return "yes" if (value <= self.limit if self.relation == "<=" else value >= self.limit) else "no"


@dataclass(frozen=True)
class Row:
    about: str
    variants: dict[str, Variant]
    micro_batches: int = 10
    rounds: int = 5
    processes: int = 1
    """Minimum number of processes, under torchrun."""
    goals: tuple[Goal, ...] = ()
    shape: dict[str, int | str] = field(default_factory=lambda: {"local_batch_size": 4})
    """The local_batch_size, and flavor and seq_len where they differ from the config's."""


ADAMW, PC = "1b_adamw_baseline.toml", "1b_adamw_pc.toml"
MUON, MUON_PC = "1b_muon_baseline.toml", "1b_muon_pc.toml"
DEBUG = "debug.toml"
TF32 = ("--pc.compute_dtype", "tf32")
EAGER = ("--compile.enable", "false")
FLOAT32 = ("--training.mixed_precision_param", "float32")
FLOAT8 = ("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output")
BY_OPERATION = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
FULL = ("--activation_checkpoint.mode", "full")
KEEP_ALL = ("--activation_checkpoint.mode", "none")
BASELINE = ("--pc.enable", "false")
LOGGED = ("--metrics.log_freq", "1")
EVERY_MICRO_BATCH = ("--parallelism.fsdp_sync", "micro_batch")
ONCE = ("--parallelism.fsdp_sync", "step")

# In order of value, for limited GPU time.
ROWS: dict[str, Row] = {
    "pc": Row(
        "1B, AdamW: PC level 4 over baseline, one GPU owning every matrix",
        {"baseline": Variant(ADAMW), "pc": Variant(PC, TF32)},
        goals=(
            Goal("time pc / baseline", "<=", 1.015),
            Goal("extra peak GiB pc - baseline", "<=", 3.0),
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
        {"baseline": Variant(ADAMW), "in graph": Variant(PC, in_graph=True)},
        rounds=4,
    ),
    "memory": Row(
        "1B, AdamW, as the paper's table of peak memory: without checkpointing, not compiled, of the largest rank",
        {
            "baseline": Variant(ADAMW, KEEP_ALL + EAGER),
            "once per step": Variant(PC, KEEP_ALL + EAGER),
            "in graph": Variant(PC, KEEP_ALL + EAGER, in_graph=True),
        },
        rounds=2,
    ),
    "memory-muon": Row(
        "the same under Muon, with PC level 2",
        {
            "baseline": Variant(MUON, KEEP_ALL + EAGER),
            "once per step": Variant(MUON_PC, KEEP_ALL + EAGER),
            "in graph": Variant(MUON_PC, KEEP_ALL + EAGER, in_graph=True),
        },
        rounds=2,
    ),
    "dtype": Row(
        "1B, AdamW, PC level 4: precision of PC's matmuls",
        {
            "tf32": Variant(PC, TF32),
            "float16": Variant(PC, ("--pc.compute_dtype", "float16")),
            "float32": Variant(PC, ("--pc.compute_dtype", "float32")),
        },
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
            "muon": Variant(MUON),
            "muon pc": Variant(MUON_PC, TF32),
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
        "1B, AdamW, baseline: activation checkpointing by operation, as in the other rows, and of whole blocks, over none",
        {"none": Variant(ADAMW, KEEP_ALL), "by operation": Variant(ADAMW, BY_OPERATION), "full": Variant(ADAMW, FULL)},
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
        shape={"local_batch_size": 8},
    ),
    "exchange": Row(
        "1B, AdamW, baseline, on all GPUs of a machine: weights gathered and gradients reduced once per step over once per "
        "micro-batch",
        {"every micro-batch": Variant(ADAMW, EVERY_MICRO_BATCH), "once": Variant(ADAMW, ONCE)},
        processes=2,
        goals=(Goal("time once / every micro-batch", "<=", 1.0),),
    ),
    "stock-cpu": Row(
        "debug model at the default run's shapes, float32, for a CPU: this project's baseline, which measures all that it "
        "logs by default in every step, over TorchTitan's own step, which logs as well",
        {
            "stock": Variant(DEBUG, BASELINE + KEEP_ALL + LOGGED, stock=True),
            "baseline": Variant(DEBUG, BASELINE + KEEP_ALL + LOGGED + ("--diagnostics.freq", "1")),
        },
        micro_batches=8,
        rounds=15,
        shape={"local_batch_size": 2},
        goals=(Goal("time baseline / stock", "<=", 1.0),),
    ),
    "modes": Row(
        "60M, AdamW, float32, not compiled, short sequences, for a CPU: PC once per step over PC in every forward pass",
        {
            "baseline": Variant(PC, BASELINE + EAGER + FLOAT32 + KEEP_ALL),
            "step": Variant(PC, EAGER + FLOAT32 + KEEP_ALL),
            "in graph": Variant(PC, EAGER + FLOAT32 + KEEP_ALL, in_graph=True),
        },
        rounds=3,
        goals=(Goal("time added by step / in graph", "<=", 0.2),),
        shape={"flavor": "60M", "seq_len": 64, "local_batch_size": 1},
    ),
}


def overrides_of(shape: dict[str, int | str]) -> list[str]:
    """`Row.shape` as overrides of a config."""
    return [f"--{'model' if key == 'flavor' else 'training'}.{key}={value}" for key, value in shape.items()]


def table(folder: Path) -> str:
    """Every row with its goals, from the JSON files of a folder."""
    lines = []
    for name, row in ROWS.items():
        file = folder / f"{name}.json"
        record = json.loads(file.read_text()) if file.is_file() else {"figures": {}, "changed": {}}
        goals = {goal.figure: goal for goal in row.goals} if not record["changed"] else {}
        for figure in record["figures"] | goals or {row.about: None}:
            goal, summary = goals.get(figure), record["figures"].get(figure)
            limit = f"{goal.relation} {goal.limit}" if goal else ""
            measured, met = "not run" if not record["figures"] else "not measured", ""
            if summary:
                measured = "{median:.4g} ({smallest:.4g} to {largest:.4g}, n = {n})".format(**summary)
                met = goal.is_met(summary["median"]) if goal else ""
            lines.append([name, figure, limit, measured, met])
    return markdown.table(["row", "figure", "goal", "measured (range)", "met"], lines)

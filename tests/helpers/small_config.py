"""A config that the real trainer finishes in seconds, in a separate process, on a CPU."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TEXT = """
parent = "{root}/train_configs/debug.toml"
[model]
vocab_size = 200
[data]
path = "{shards}"
validation_sequences = 4
[lr_scheduler]
warmup_steps = 1
[training]
seq_len = 32
local_batch_size = 2
global_batch_size = 2
steps = {steps}
mixed_precision_param = "float32"
[validation]
freq = {steps}
local_batch_size = 2
[checkpoint]
interval = {interval}
[metrics]
log_freq = 1
enable_tensorboard = false
[health]
freq = 0
spectra_freq = 0
estimate_freq = 0
"""


def write_small_config(path: Path, shards: Path, steps: int, interval: int) -> Path:
    path.write_text(TEXT.format(root=ROOT, shards=shards, steps=steps, interval=interval))
    return path

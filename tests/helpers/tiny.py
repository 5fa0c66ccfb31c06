"""A tiny trainer: text, tokenizer, config and a worker that trains, small enough for many runs in a test."""

import json
import random
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w
import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from helpers.toy import whole
from pc_recipe.config import load_config
from pc_recipe.config import write_config as write_resolved
from pc_recipe.config.model_sizes import FLAVORS, Flavor
from pc_recipe.train.checkpoint import Checkpoints
from pc_recipe.train.llama2 import Llama2Args
from pc_recipe.train.upstream_config import JobConfig

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 200
# 24 rows divide over three ranks, 64 do not; over four, no vector divides evenly.
FLAVORS["tiny"] = Flavor(dim=24, n_layers=2, n_heads=2, multiple_of=8)

CONFIG = """
parent = "{base}"
[job]
dump_folder = "{folder}"
[model]
flavor = "tiny"
vocab_size = {vocab_size}
[data]
path = "{shards}"
validation_sequences = 12
[optimizer]
lr = 1e-2
implementation = "foreach"
[lr_scheduler]
warmup_steps = 2
[training]
seq_len = 16
local_batch_size = 2
global_batch_size = 12
steps = 6
[validation]
freq = 3
local_batch_size = -1
[checkpoint]
interval = 3
keep_latest_k = 0
[metrics]
log_freq = 1
enable_tensorboard = false
[diagnostics]
freq = 0
spectra_freq = 0
[parallelism]
pipeline_parallel_microbatch_size = 1
"""


def model_args(flavor: str, **changes: Any) -> Llama2Args:
    return Llama2Args(**asdict(FLAVORS[flavor]) | changes)


def make_shards(folder: Path, tokenizer: str | None = None) -> Path:
    """Make token shards of synthetic sentences; returns their folder. By default a tokenizer is trained on the sentences."""
    from pc_recipe.data.tokenizing import tokenize

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    texts = [" ".join(draw.choices(words, k=40)) for _ in range(300)]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), folder / "text.parquet")
    tokenizer = tokenizer or _make_tokenizer(folder / "tokenizer", texts)
    tokenize(str(folder / "text.parquet"), folder / "shards", tokenizer=tokenizer, validation_fraction=0.2)
    return folder / "shards"


def _make_tokenizer(folder: Path, texts: list[str]) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


def write_config(path: Path, shards: Path, run_folder: Path) -> Path:
    """A config for the tiny model; `run_folder` is where the run writes."""
    base = ROOT / "train_configs" / "debug.toml"
    path.write_text(CONFIG.format(base=base, folder=run_folder, shards=shards, vocab_size=VOCAB_SIZE))
    return path


def write_small_config(path: Path, shards: Path, steps: int, interval: int) -> Path:
    """The same for separate processes, which know only the recipe's model sizes; a step is one batch of two sequences."""
    config = tomllib.loads(write_config(path, shards, path.with_suffix("")).read_text())
    config["model"]["flavor"] = "debug"
    config["training"] |= {"seq_len": 32, "global_batch_size": 2, "steps": steps}
    config["validation"]["freq"] = steps
    config["checkpoint"] = {"interval": interval}
    config["data"]["validation_sequences"] = 4
    config["optimizer"]["lr"] = 3e-3
    path.write_text(tomli_w.dumps(config))
    return path


def trainer_class():
    import torchtitan.train

    from pc_recipe.train.trainer import Trainer

    # TorchTitan's trainer ends with a wait of two seconds for other ranks, most of the time of such a run.
    torchtitan.train.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    return Trainer


def make_trainer(config: Path, overrides: list[str]):
    return trainer_class()(load_config(config, overrides))


def make_checkpoints(folder: Path, **settings: Any) -> Checkpoints:
    """The checkpoint manager of a run without a trainer; settings: keys of the section `checkpoint`."""
    config = load_config(ROOT / "train_configs" / "debug.toml", [f"--job.dump_folder={folder}"])
    for key, value in {"enable": True, **settings}.items():
        setattr(config.checkpoint, key, value)
    return Checkpoints(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None,
        checkpoint_config=JobConfig(config).checkpoint, base_folder=folder,
    )  # fmt: skip


def train(rank: int, config: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """Run the trainer on one rank; returns all tensors of the model whole, by checkpoint name."""
    trainer = make_trainer(config, overrides)
    if rank == 0:
        write_resolved(trainer.config, trainer.config.folder / "config.toml")
    trainer.train()
    result = state_of(trainer)
    trainer.close()
    return result


def state_of(trainer) -> dict[str, torch.Tensor]:
    """Parameters and buffers of this rank's model parts, as whole tensors under their checkpoint names."""
    return {name: whole(tensor) for name, tensor in trainer.checkpointer.states["model"].state_dict().items()}


def load_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    """{name: full tensor} of a checkpoint, by torch's own reader."""
    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata.items()
    state = {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in entries if hasattr(e, "properties")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def metrics(run_folder: Path, key: str = "loss") -> list[float]:
    """The values of a key in a run's metrics.jsonl by step; if a step has several lines, the last."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line[key] for line in lines if key in line}
    return [value for _, value in sorted(by_step.items())]

"""Time and memory of a training step, with interleaved variants in one process.

    python benchmarks/step.py ROW [--output results/DATE-NAME] [--local-batch-size N ...]
    torchrun --nproc-per-node N benchmarks/step.py ROW ...      # on N GPUs, or N processes of a CPU
    python benchmarks/step.py --table results/DATE-NAME

A row of `ROWS` is a few variants of the real trainer, all in memory at once. After a warm-up they alternate steps (A B
A B ...), so that a drifting clock rate or a busy machine affects all of them. Figures are medians with their range;
ratios are computed per round. On a GPU, time is measured by events in its stream. On a CPU it is CPU time of the
process, because wall clock depends on other users of the machine; with several processes, which wait for each other, it
is wall clock. Peak memory is measured on GPUs only.

The calls of PC's preconditioner are timed in the same steps, which needs no synchronisation. For the rest of a step use a
profiler ([profiling] in the TOML).

Each row's JSON file is written after every round, so a crash or a time limit loses at most one round. `--table` prints
all rows with their goals, and which were not run.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torchtitan.train
from torch import Tensor
from torch.nn.attention import SDPBackend
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.metrics import build_metrics_processor
from torchtitan.components.optimizer import build_optimizers
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.protocols.train_spec import register_train_spec

from pc.command import exit_on_user_error
from pc.layer import PCLinear, put_in_graph
from pc_recipe.config import Config, load_config
from pc_recipe.files.atomic import write_atomically
from pc_recipe.runs.launch import STEPS_ALONE
from pc_recipe.train import cpu
from pc_recipe.train.parallelize import parallelize
from pc_recipe.train.train_spec import TRAIN_SPEC
from pc_recipe.train.trainer import Trainer
from pc_recipe.train.upstream_config import JobConfig
from rows import BY_OPERATION, ROWS, Row, Variant, overrides_of, table
from timing import ON_GPU, hardware

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "train_configs"
GIB = 2**30
PASSES = {"pull back": "pull_back", "write": "_write"}
"""methods of PC's preconditioner"""


class RandomTokens:
    """An endless data loader of the same random sequences: input {"input": [B, S]} and labels [B, S], int64."""

    position = 0

    def __init__(self, config: Config) -> None:
        training = config.training
        generator = torch.Generator().manual_seed(0)
        shape = (training.local_batch_size, training.seq_len + 1)
        self._tokens = torch.randint(config.model.vocab_size, shape, generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield {"input": self._tokens[:, :-1].contiguous()}, self._tokens[:, 1:].contiguous()

    def look_ahead(self, count: int) -> None:
        """There are always more tokens."""


def _build_loader(dp_world_size, dp_rank, tokenizer, job_config) -> RandomTokens:
    return RandomTokens(job_config.ours)


def register_specs() -> None:
    """Register the trainer's own spec and TorchTitan's for the same sizes, both with random tokens."""
    ours = dataclasses.replace(TRAIN_SPEC, build_dataloader_fn=_build_loader, build_validator_fn=None)
    register_train_spec("benchmark_ours", ours)
    stock = dataclasses.replace(
        ours,
        model_cls=Transformer,
        parallelize_fn=parallelize_llama,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_metrics_processor_fn=build_metrics_processor,
    )
    register_train_spec("benchmark_stock", stock)
    in_graph = dataclasses.replace(
        ours, parallelize_fn=lambda model, dims, titan: parallelize(_in_graph(model, titan.ours), dims, titan)
    )
    register_train_spec("benchmark_in_graph", in_graph)


def _in_graph(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    put_in_graph(model, config.pc.pc_config)
    return model


def _refresh_after_steps(trainer: torchtitan.train.Trainer) -> None:
    """What a loop does with `pc.PCLinear` layers."""
    layers = [layer for model in trainer.model_parts for layer in model.modules() if isinstance(layer, PCLinear)]
    for layer in layers:
        layer.start()
        layer.refresh()
    trainer.optimizers.register_step_post_hook(lambda *_: [layer.refresh() for layer in layers])


def build(variant: Variant, shape: dict[str, int | str], micro_batches: int, folder: str) -> torchtitan.train.Trainer:
    """A trainer that logs, saves and validates nothing."""
    overrides = [
        *STEPS_ALONE,
        f"--job.dump_folder={folder}",
        f"--training.steps={10**6}",
        f"--metrics.log_freq={10**9}",
        *BY_OPERATION,  # the trainers of a row share one GPU
    ]
    overrides += ["--lr_scheduler.warmup_steps=1", *overrides_of(shape), *variant.overrides]
    if "quantize.linear.float8" in variant.overrides and not ON_GPU:
        overrides += ["--quantize.linear.float8.emulate", "true", "--compile.enable", "false"]
    config = load_config(CONFIGS / variant.config, overrides)
    config.training.global_batch_size = config.training.local_batch_size * micro_batches * dist.get_world_size()
    config.model.name = f"benchmark_{'stock' if variant.stock else 'in_graph' if variant.in_graph else 'ours'}"
    if variant.in_graph:
        config.pc = config.pc.model_copy(update={"enable": False})
    trainer = torchtitan.train.Trainer(JobConfig(config)) if variant.stock else Trainer(config)
    if variant.in_graph:
        _refresh_after_steps(trainer)
    if variant.attention:
        for model in trainer.model_parts:
            for module in model.modules():
                if isinstance(module, ScaledDotProductAttentionWrapper):
                    module.sdpa_backends = [getattr(SDPBackend, variant.attention)]
    trainer.step = 2  # the first is always logged
    return trainer


class Clock:
    """Seconds between time stamps: GPU stream, CPU time of this process, or wall clock with several processes."""

    def __init__(self, processes: int) -> None:
        self._now = time.process_time if processes == 1 else time.perf_counter
        self.name = "GPU stream" if ON_GPU else "CPU time of the process" if processes == 1 else "wall clock"

    def now(self):
        if ON_GPU:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return self._now()

    def seconds(self, start, end) -> float:
        if ON_GPU:
            end.synchronize()
            return start.elapsed_time(end) / 1000
        return end - start


def timed_step(trainer: torchtitan.train.Trainer, clock: Clock, step: Callable[[], None]) -> dict[str, float]:
    """Take one step; returns its seconds, as "step", and those of the calls of PC's preconditioner in it."""
    spans: list[tuple[str, object, object]] = []

    def timed(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            start = clock.now()
            result = function(*args, **kwargs)
            spans.append((name, start, clock.now()))
            return result

        return call

    preconditioner = getattr(trainer, "preconditioner", None)
    with contextlib.ExitStack() as undo:
        for name, method in PASSES.items() if preconditioner is not None else ():
            undo.enter_context(mock.patch.object(preconditioner, method, timed(name, getattr(preconditioner, method))))
        timed("step", step)()
    parts: dict[str, float] = defaultdict(float)
    for name, start, end in spans:
        parts[name] += clock.seconds(start, end)
    return dict(parts)


class Measured:
    """A variant's trainer, its steps and its memory."""

    def __init__(self, variant: Variant, shape: dict[str, int | str], micro_batches: int, folder: str) -> None:
        """Build the trainer and take two steps like the measured ones, with fewer micro-batches."""
        before = _allocated()
        self._trainer = build(variant, shape, micro_batches, folder)
        self._batches = self._trainer.batch_generator(self._trainer.dataloader)
        self._clock = Clock(dist.get_world_size())
        self._steps: list[dict[str, float]] = []
        self._peaks: list[float] = []
        self._trainer.gradient_accumulation_steps = min(2, micro_batches)
        for _ in range(2):
            self._step()
        self._trainer.gradient_accumulation_steps = micro_batches
        self._held = _allocated() - before

    def _step(self) -> None:
        self._trainer.train_step(self._batches)

    def measure(self) -> float:
        """Take a step; returns its seconds."""
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        others = _allocated() - self._held
        dist.barrier()
        self._steps.append(timed_step(self._trainer, self._clock, self._step))
        if ON_GPU:
            self._peaks.append((torch.cuda.max_memory_allocated() - others) / GIB)
        return self._steps[-1]["step"]

    def result(self) -> dict:
        training, metrics = self._trainer.job_config.training, self._trainer.metrics_processor
        parts = {part: [step[part] for step in self._steps] for part in self._steps[0]}
        seconds = parts.pop("step")
        # per process
        tokens = training.local_batch_size * training.seq_len * self._trainer.gradient_accumulation_steps
        per_second = tokens / statistics.median(seconds)
        return {
            "seconds": seconds,
            "tokens_per_step": tokens,
            "tokens_per_second": per_second,
            # TorchTitan's formula, which counts attention fully
            "utilisation": metrics.num_flops_per_token * per_second / metrics.gpu_peak_flops if ON_GPU else None,
            "peak_gib": self._peaks or None,
            "parts": parts,
        }

    def close(self) -> None:
        self._trainer.close()


def _allocated() -> int:
    """Bytes on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if ON_GPU else 0


def measure(row: Row, shape: dict[str, int | str], micro_batches: int, rounds: int) -> Iterator[dict]:
    """Take `rounds` interleaved steps of all variants; yield all results so far after each round."""
    register_specs()
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # ranks have to agree in all settings; nothing is written there
        for name, variant in row.variants.items():
            _say(f"building and warming up {name} ...")
            measured[name] = Measured(variant, shape, micro_batches, folders[0])
        for index in range(rounds):
            for name, one in measured.items():
                _say(f"round {index + 1}/{rounds}: {name} {one.measure():.3f} s")
            yield {name: one.result() for name, one in measured.items()}
        for one in measured.values():
            one.close()


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def figures(variants: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Ratios of each variant to the previous one and to the first, and the figures of goals: median and range."""
    result: dict[str, dict[str, float]] = {}
    names = list(variants)
    pairs = {(names[i], names[j]) for i in range(1, len(names)) for j in (0, i - 1)}
    for name, other in sorted(pairs, key=lambda pair: (names.index(pair[0]), names.index(pair[1]))):
        a, b = variants[name], variants[other]
        ratios = [x / y for x, y in zip(a["seconds"], b["seconds"], strict=True)]
        result[f"time {name} / {other}"] = _summary(ratios)
        if a["peak_gib"]:
            extra = [x - y for x, y in zip(a["peak_gib"], b["peak_gib"], strict=True)]
            result[f"extra peak GiB {name} - {other}"] = _summary(extra)
    for name, variant in variants.items():
        if variant["utilisation"]:
            result[f"utilisation {name}"] = _summary([variant["utilisation"]])
    if names == ["baseline", "step", "in graph"]:
        rounds = zip(*(variant["seconds"] for variant in variants.values()), strict=True)
        added = [(step - plain) / (in_graph - plain) for plain, step, in_graph in rounds]
        result["time added by step / in graph"] = _summary(added)
    return result


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "n": len(values)}


def about_this_run(command: list[str], processes: int = 1) -> dict:
    """What is needed to repeat the measurement."""
    try:
        describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:  # git is not installed
        commit = ""
    return {
        "command": " ".join(["python benchmarks/step.py", *command]),
        "commit": commit or "unknown",
        "date": datetime.date.today().isoformat(),
        "hardware": hardware() if ON_GPU else f"{len(os.sched_getaffinity(0))}-core CPU",
        "threads": torch.get_num_threads(),
        "processes": processes,
        "clock": Clock(processes).name,
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "torchtitan")}},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", help=", ".join(ROWS))
    parser.add_argument("--output", type=Path, help="folder for ROW.json; printed otherwise")
    parser.add_argument("--table", type=Path, help="print the rows of this folder with their goals")
    parser.add_argument("--flavor", help="another model size, to try a row on a small machine")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--local-batch-size", type=int)
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--rounds", type=int)
    return parser


def start_processes() -> None:
    cpu.use_cpu_where_there_is_no_gpu()
    backend = "nccl" if ON_GPU else "gloo"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(backend)
    else:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@exit_on_user_error
def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.table:
        if not chosen.table.is_dir():
            parser.error(f"no folder {chosen.table}")
        print(table(chosen.table), end="")
        return
    if chosen.row not in ROWS:
        parser.error(f"ROW should be one of {', '.join(ROWS)}, got {chosen.row}")
    row = ROWS[chosen.row]
    changes = {key: getattr(chosen, key) for key in ("flavor", "seq_len", "local_batch_size") if getattr(chosen, key)}
    micro_batches, rounds = chosen.micro_batches or row.micro_batches, chosen.rounds or row.rounds
    start_processes()
    if dist.get_world_size() < row.processes:
        parser.error(
            f"row {chosen.row} is about several processes: torchrun --nproc-per-node 2 benchmarks/step.py {chosen.row}"
        )
    record = {
        "row": chosen.row,
        "about": row.about,
        # Goals apply only to the row's own sizes.
        "changed": changes | ({"micro_batches": micro_batches} if micro_batches != row.micro_batches else {}),
        **about_this_run(arguments if arguments is not None else sys.argv[1:], dist.get_world_size()),
        "rounds": rounds,
    }
    is_first = dist.get_rank() == 0
    try:
        for variants in measure(row, row.shape | changes, micro_batches, rounds):
            record |= {"figures": figures(variants), "variants": variants}
            text = json.dumps(record, indent=1) + "\n"
            if chosen.output and is_first:
                write_atomically(chosen.output / f"{chosen.row}.json", text)
    finally:
        dist.destroy_process_group()
    if is_first:
        print(text if not chosen.output else json.dumps(record["figures"], indent=1))


if __name__ == "__main__":
    main()

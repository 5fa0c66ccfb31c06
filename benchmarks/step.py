"""Time and memory of a training step, with interleaved variants in one process.

    python benchmarks/step.py ROW [--output results/DATE-NAME] [--local-batch-size N ...]
    torchrun --nproc-per-node N benchmarks/step.py ROW ...      # on N GPUs, or N processes of a CPU
    python benchmarks/step.py --table results/DATE-NAME

A row of `ROWS` is a few variants of the real trainer, all in memory at once. After a warm-up they alternate steps (A B
A B ...), so that a drifting clock rate or a busy machine affects all of them. Figures are medians with their range;
ratios are computed per round. On a GPU, time is measured by events in its stream. On a CPU it is CPU time of the
process, because wall clock depends on other users of the machine; with several processes, which wait for each other, it
is wall clock. Peak memory is measured on GPUs only. The parts of a step are timed in the same steps, which needs no
synchronisation.

Activation checkpointing is that of the configs unless a variant changes it; its recomputation counts as "backward".

Each row's JSON file is written after every round, so a crash or a time limit loses at most one round. `--table` prints
all rows with their goals, and which were not run.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
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
from torch import Tensor
from torch.nn.attention import SDPBackend
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.metrics import build_metrics_processor
from torchtitan.components.optimizer import build_optimizers
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils
from torchtitan.train import Trainer

import pc
import pc.linear
import pc.passes
import pc.titan.optimizers
from pc import polynomial
from pc.common.files import write_atomically
from pc.errors import UserError, exit_on_user_error
from pc.launch.torchrun import STEPS_ALONE
from pc.linear import effective_weight
from pc.owner import local
from pc.titan import cpu
from pc.titan.environment import PACKAGES
from pc.titan.trainer import TRAIN_SPEC, PCTrainer, load_config
from rows import ROWS, Row, Variant, overrides_of, table

CONFIGS = Path(__file__).resolve().parents[1] / "train_configs"
GIB = 2**30


class RandomTokens:
    """An endless data loader of the same random sequences: input {"input": [B, S]} and labels [B, S], int64."""

    def __init__(self, job_config) -> None:
        training = job_config.training
        generator = torch.Generator().manual_seed(0)
        shape = (training.local_batch_size, training.seq_len + 1)
        self._tokens = torch.randint(job_config.model.vocab_size, shape, generator=generator)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            yield {"input": self._tokens[:, :-1].contiguous()}, self._tokens[:, 1:].contiguous()


def _build_loader(dp_world_size, dp_rank, tokenizer, job_config) -> RandomTokens:
    return RandomTokens(job_config)


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


def build(variant: Variant, shape: dict[str, int | str], micro_batches: int, folder: str) -> Trainer:
    """A trainer that logs, saves and validates nothing."""
    overrides = [*STEPS_ALONE, f"--model.name=benchmark_{'stock' if variant.stock else 'ours'}"]
    overrides += [f"--job.dump_folder={folder}", f"--training.steps={10**6}", f"--metrics.log_freq={10**9}"]
    overrides += ["--lr_scheduler.warmup_steps=1", *overrides_of(shape), *variant.overrides]
    if "quantize.linear.float8" in variant.overrides and not torch.cuda.is_available():
        overrides += ["--quantize.linear.float8.emulate", "true", "--compile.enable", "false"]
    config = load_config(CONFIGS / variant.config, overrides)
    config.training.global_batch_size = config.training.local_batch_size * micro_batches * dist.get_world_size()
    trainer = (Trainer if variant.stock else PCTrainer)(config)
    if variant.attention:
        for model in trainer.model_parts:
            for module in model.modules():
                if isinstance(module, ScaledDotProductAttentionWrapper):
                    module.sdpa_backends = [getattr(SDPBackend, variant.attention)]
    trainer.step = 2  # the first is always logged
    return trainer


# Timed inside another part and subtracted from it.
PARTS_WITHIN = {
    "forward": ("PC in forward",),
    "backward": ("PC in backward", "pull_back"),
    "optimizer": ("restore_raw", "materialise", "power iteration"),
}
# Parts that a plain model does not have, without copying the raw weight in and out.
PARTS_OF_PC = ("pull_back", "materialise", "PC in forward", "PC in backward", "power iteration")


class Clock:
    """Seconds between time stamps: GPU stream, CPU time of this process, or wall clock with several processes."""

    def __init__(self, is_gpu: bool, processes: int = 1) -> None:
        self._is_gpu = is_gpu
        self._now = time.process_time if processes == 1 else time.perf_counter
        self.name = "GPU stream" if is_gpu else "CPU time of the process" if processes == 1 else "wall clock"

    def now(self):
        if self._is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return self._now()

    def seconds(self, start, end) -> float:
        if self._is_gpu:
            end.synchronize()
            return start.elapsed_time(end) / 1000
        return end - start


class Parts:
    """Seconds of one step and of its parts, by temporarily wrapping the trainer's own functions."""

    def __init__(self, trainer: Trainer, clock: Clock) -> None:
        self._trainer, self._clock = trainer, clock
        self._spans: list[tuple[str, object, object]] = []
        self._starts: dict[str, object] = {}

    def take(self, step: Callable[[], None]) -> dict[str, float]:
        """Take one step; "rest" is clipping, data and Python."""
        trainer = self._trainer
        schedule = getattr(trainer, "pc_schedule", None)
        with contextlib.ExitStack() as undo:
            self._wrap(undo, trainer, "forward_backward_step", before="forward", after="backward")
            self._wrap(undo, trainer, "loss_fn", after="forward", then="backward")
            self._wrap(undo, trainer.optimizers, "step", before="optimizer", after="optimizer")
            if schedule is not None:
                for name in ("pull_back", "restore_raw", "materialise"):
                    self._wrap(undo, schedule, name, before=name, after=name)
            elif not trainer.job_config.compile.enable:  # the inside of a compiled graph cannot be timed
                undo.enter_context(mock.patch.object(pc.linear, "effective_weight", self._timed_effective_weight))
                self._wrap(undo, pc.linear.PCLinear, "refresh", before="power iteration", after="power iteration")
            self._start("step")
            step()
            self._stop("step")
        parts: dict[str, float] = defaultdict(float)
        for part, start, end in self._spans:
            parts[part] += self._clock.seconds(start, end)
        for outer, inside in PARTS_WITHIN.items():
            parts[outer] -= sum(parts.get(part, 0.0) for part in inside)
        parts["rest"] = 2 * parts["step"] - sum(parts.values())
        return dict(parts)

    def _start(self, part: str) -> None:
        self._starts[part] = self._clock.now()

    def _stop(self, part: str) -> None:
        self._spans.append((part, self._starts.pop(part), self._clock.now()))

    def _wrap(self, undo, owner, name: str, *, before: str = "", after: str = "", then: str = "") -> None:
        original = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if before:
                self._start(before)
            result = original(*args, **kwargs)
            self._stop(after)
            if then:
                self._start(then)
            return result

        undo.enter_context(mock.patch.object(owner, name, wrapped))

    def _timed_effective_weight(self, weight: Tensor, *others) -> Tensor:
        """`effective_weight`; hooks on its tensors mark where the backward pass enters and leaves it."""
        self._start("PC in forward")
        weight = weight.view_as(weight)  # a tensor of this call alone
        weight.register_hook(lambda _: self._stop("PC in backward"))
        result = effective_weight(weight, *others)  # as it was imported, without the timer
        result.register_hook(lambda _: self._start("PC in backward"))
        self._stop("PC in forward")
        return result


_compiled = functools.cache(torch.compile)


@contextlib.contextmanager
def compiled_pc(enabled: bool):
    """Run power iteration, Gram matrix, polynomial and its vector-Jacobian product through torch.compile."""
    functions = [(pc.passes, "power_iteration_by_gram"), *((polynomial, n) for n in ("gram_matrix", "apply", "vjp"))]
    with contextlib.ExitStack() as undo:
        for owner, name in functions if enabled else ():
            undo.enter_context(mock.patch.object(owner, name, _compiled(getattr(owner, name))))
        yield


def bytes_held(trainer: Trainer) -> int:
    """Bytes of parameters, gradients, buffers, optimizer state and PC's state, each storage once."""
    tensors: list[Tensor] = []
    for model in trainer.model_parts:
        tensors += [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for optimizer in trainer.optimizers.optimizers:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    tensors += pc_state(trainer)
    storages = {local(t).untyped_storage().data_ptr(): local(t).untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def pc_state(trainer: Trainer) -> list[Tensor]:
    """Tensors of schedule "step" besides the plain model's."""
    schedule = getattr(trainer, "pc_schedule", None)
    layers = schedule.layers.values() if schedule is not None else ()
    return [tensor for state in layers for tensor in (state.raw, state.u, state.v)]


def measure(row: Row, shape: dict[str, int | str], micro_batches: int, rounds: int) -> Iterator[dict]:
    """Build all variants, warm up, and take `rounds` interleaved steps; yield all results so far after each round."""
    is_gpu = utils.device_type == "cuda"
    clock = Clock(is_gpu, dist.get_world_size())
    register_specs()
    trainers: dict[str, Trainer] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, variant in row.variants.items():
            _say(f"building {name} ...")
            trainers[name] = build(variant, shape, micro_batches, folder)
        iterators = {name: trainer.batch_generator(trainer.dataloader) for name, trainer in trainers.items()}
        parts: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
        peaks: dict[str, list[float]] = {name: [] for name in trainers}

        def step(name: str) -> None:
            with compiled_pc(row.variants[name].compile_pc):
                trainers[name].train_step(iterators[name])

        for name, trainer in trainers.items():
            _say(f"warming up {name} ...")
            # Like a measured step except for the number of micro-batches.
            trainer.gradient_accumulation_steps = min(2, micro_batches)
            for _ in range(2):
                step(name)
            trainer.gradient_accumulation_steps = micro_batches
        for index in range(rounds):
            for name, trainer in trainers.items():
                if is_gpu:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    others = torch.cuda.memory_allocated() - bytes_held(trainer)
                dist.barrier()
                parts[name].append(Parts(trainer, clock).take(functools.partial(step, name)))
                if is_gpu:
                    peaks[name].append((torch.cuda.max_memory_allocated() - others) / GIB)
                _say(f"round {index + 1}/{rounds}: {name} {parts[name][-1]['step']:.3f} s")
            yield {
                name: _variant_result(trainer, parts[name], peaks[name], micro_batches)
                for name, trainer in trainers.items()
            }
        for trainer in trainers.values():
            trainer.close()


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def _variant_result(trainer: Trainer, steps: list[dict[str, float]], peaks: list[float], micro_batches: int) -> dict:
    training = trainer.job_config.training
    parts = {part: [step[part] for step in steps] for part in steps[0]}
    seconds = parts.pop("step")
    tokens = training.local_batch_size * training.seq_len * micro_batches  # per process
    per_second = tokens / statistics.median(seconds)
    flops_per_token = trainer.metrics_processor.num_flops_per_token
    peak_flops = trainer.metrics_processor.gpu_peak_flops if utils.device_type == "cuda" else None
    return {
        "seconds": seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": per_second,
        # TorchTitan's formula, which counts attention fully
        "utilisation": flops_per_token * per_second / peak_flops if peak_flops else None,
        "peak_gib": peaks or None,
        "held_gib": bytes_held(trainer) / GIB,
        "pc_state_gib": dist.get_world_size()
        * sum(local(t).numel() * local(t).element_size() for t in pc_state(trainer))
        / GIB,
        "parts": parts,
    }


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
        if variant["pc_state_gib"]:
            result[f"PC state GiB per GPU of 8, {name}"] = _summary([variant["pc_state_gib"] / 8])
    if list(variants) == ["step", "in graph"]:
        on_pc = {
            name: [sum(values) for values in zip(*(v for part, v in variant["parts"].items() if part in PARTS_OF_PC))]
            for name, variant in variants.items()
        }
        ratios = [x / y for x, y in zip(on_pc["step"], on_pc["in graph"], strict=True)]
        result["time on PC step / in graph"] = _summary(ratios)
    return result


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "n": len(values)}


def about_this_run(command: list[str], processes: int = 1) -> dict:
    """What is needed to repeat the measurement."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=CONFIGS.parent)
        except OSError:  # git is not installed
            return "unknown"
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    is_gpu = utils.device_type == "cuda"
    return {
        "command": " ".join(["python benchmarks/step.py", *command]),
        "commit": git("rev-parse", "--short", "HEAD"),
        "uncommitted": bool(
            git("status", "--porcelain", "--", ":(glob)pc/*.py", "pc/titan", "benchmarks", "train_configs")
        ),
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if is_gpu else f"{len(os.sched_getaffinity(0))}-core CPU",
        "threads": torch.get_num_threads(),
        "processes": processes,
        "clock": Clock(is_gpu, processes).name,
        "versions": {"python": platform.python_version(), **{p: version(p) for p in PACKAGES[:2]}},
    }


@exit_on_user_error
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", help=", ".join(ROWS))
    parser.add_argument("--output", type=Path, help="folder for ROW.json; printed otherwise")
    parser.add_argument("--table", type=Path, help="print the rows of this folder with their goals")
    parser.add_argument("--flavor", help="another model size, to try a row on a small machine")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--local-batch-size", type=int)
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--rounds", type=int)
    chosen = parser.parse_args(arguments)
    if chosen.table:
        print(table(chosen.table), end="")
        return
    if chosen.row not in ROWS:
        raise UserError(f"ROW should be one of {', '.join(ROWS)}, got {chosen.row}")
    row = ROWS[chosen.row]
    changes = {key: getattr(chosen, key) for key in ("flavor", "seq_len", "local_batch_size") if getattr(chosen, key)}
    micro_batches, rounds = chosen.micro_batches or row.micro_batches, chosen.rounds or row.rounds
    cpu.use_cpu_where_there_is_no_gpu()
    backend = "nccl" if utils.device_type == "cuda" else "gloo"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group(backend)
    else:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() < row.processes:
        raise UserError(
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

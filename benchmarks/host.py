"""What the host does in a step besides the model's passes, as one of many ranks: operations, exchanges and CPU time.

    python benchmarks/host.py [--ranks 8 64 512] [--rounds 5]

A 1B model's number of weights, each tiny, on a CPU; torch's fake process group, whose exchanges do nothing. "rest" is all
but the model's passes, PC's calls and the optimizer's step: tokens counted, finite steps, gradient norm and clipping,
metrics, the question whether to stop. TorchTitan's own step has a rest as well. An operation is one of ATen's that is no
view and allocates more than memory, on one tensor or, as `_foreach_norm`, on a list.
"""

import argparse
import contextlib
import functools
import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torchtitan.train
from torch.distributed.tensor import DTensor
from torch.multiprocessing import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pc_recipe.files import markdown
from pc_recipe.train import cpu
from rows import ADAMW, EAGER, FLOAT32, KEEP_ALL, PC, Variant
from step import build, register_specs

TINY = tuple("--model.dim 64 --model.ffn_dim 160 --model.n_heads 2 --model.vocab_size 64 --training.seq_len 16".split())
SETTINGS = (*TINY, *EAGER, *FLOAT32, *KEEP_ALL, "--training.max_nonfinite_steps", str(10**6))
EVERY = ("--metrics.log_freq", "1", "--diagnostics.freq", "1")
NEVER = ("--metrics.log_freq", str(10**9), "--diagnostics.freq", "0")
VARIANTS = {
    "TorchTitan's, logged": Variant(ADAMW, SETTINGS + EVERY, stock=True),
    "ours, logged with every metric": Variant(PC, SETTINGS + EVERY),
    "ours, not logged": Variant(PC, SETTINGS + NEVER),
}
MICRO_BATCHES = 10


class Counts(TorchDispatchMode):
    """Operations and exchanges, and CPU seconds, by part."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.exchanges, self.seconds = (defaultdict(float) for _ in range(3))
        self._part = ""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operations on shards come here again
        name = function._overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional"):
            self.exchanges[self._part] += "wait" not in name and "wrap" not in name
        elif function.namespace == "aten" and not function.is_view and "empty" not in name:
            self.operations[self._part] += name != "_local_scalar_dense"
        return function(*args, **(kwargs or {}))

    def timed(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            outer, self._part = self._part, part
            begin = time.process_time()
            result = function(*args, **kwargs)
            seconds = time.process_time() - begin
            self.seconds[part] += seconds
            self.seconds[outer] -= seconds
            self._part = outer
            return result

        return call


def steps_of(variant: Variant, rounds: int) -> tuple[Counts, dict[str, float]]:
    """Counts of one step, and the median seconds of each part in later ones."""
    counts, trainer = Counts(), build(variant, {"local_batch_size": 1}, MICRO_BATCHES, "outputs/host")
    for owner, part, names in (
        (getattr(trainer, "preconditioner", None), "PC", ("pull_back", "restore_raw", "write_pc")),
        (trainer.optimizers, "optimizer", ("step", "zero_grad")),
        (getattr(trainer, "finite_steps", None), "", ("skips",)),
    ):
        for name in names if owner is not None else ():
            function = getattr(owner, name)
            setattr(owner, name, counts.timed(part, function) if part else never_finite(function))
    batches = trainer.batch_generator(trainer.dataloader)
    model = counts.timed("model", torchtitan.train.Trainer.forward_backward_step)
    found: list[dict[str, float]] = []
    with mock.patch.object(torchtitan.train.Trainer, "forward_backward_step", model):
        for index in range(2 + rounds):
            trainer.step += 1
            counts.seconds.clear()
            with counts if index == 1 else contextlib.nullcontext():  # counting takes time
                counts.timed("rest", lambda: (trainer.should_continue_training(), trainer.train_step(batches)))()
            found.append(dict(counts.seconds))
    trainer.close()
    gc.collect()
    return counts, {part: statistics.median(one[part] for one in found[2:]) for part in found[-1]}


def never_finite(skips: Callable) -> Callable:
    """The fake exchanges leave numbers in memory as they are; still let every step be one of the usual kind."""

    def call(*arguments) -> bool:
        skips(*arguments)
        return False

    return call


def on_rank(_: int, ranks: int, rounds: int) -> None:
    torch.set_num_threads(1)
    cpu.use_cpu_where_there_is_no_gpu()
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with mock.patch.object(dist, "new_group", lambda *_, **__: None):  # a gloo group would wait for the others
        register_specs()
        print(
            markdown.table(["step", "part", "operations", "exchanges", "CPU ms"], rows(ranks, rounds)),
            end="",
            flush=True,
        )


def rows(ranks: int, rounds: int) -> Iterator[list]:
    for name, variant in VARIANTS.items():
        counts, seconds = steps_of(variant, rounds)
        for part in ("rest", "PC") if "PC" in seconds else ("rest",):
            done = round(counts.operations[part]), round(counts.exchanges[part])
            yield [f"{ranks} ranks: {name}", part, *done, f"{1e3 * seconds[part]:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        spawn(on_rank, (ranks, chosen.rounds))


if __name__ == "__main__":
    main()

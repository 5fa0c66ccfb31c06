"""How often weights are gathered and gradients reduced (`parallelism.fsdp_sync`), and the memory that this takes."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor

from helpers import tiny
from helpers.fake_ranks import Counts
from helpers.ranks import run_ranks

MICRO_BATCHES, RANKS, LAYERS = 3, 8, 2
GATHER, REDUCE, ALL_REDUCE, EXCHANGE = (
    f"c10d.{name}.default" for name in ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_")
)
AC = ["--activation_checkpoint.mode", "full"]
QUIET = ["--validation.enable", "false", "--checkpoint.enable", "false"]


def _sync(way: str) -> list[str]:
    return ["--parallelism.fsdp_sync", way]


def _collectives(rank, config, cases) -> list[Counter[str]]:
    """Collectives of the second step for each case (a list of overrides), as the first of 8 fake ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    dist.new_group = lambda **_: None  # a gloo group would wait for the others
    results = []
    for overrides in cases:
        trainer = tiny.make_trainer(config, [*QUIET, *overrides])
        trainer.metrics_processor.should_log = lambda step: False
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        with Counts(rank) as counts:
            trainer.train_step(batches)
        results.append(counts.others)
        trainer.close()
    return results


def test_collectives_of_a_step(tiny_config):
    """Three micro-batches on a group of eight, or on two replicas of four."""
    batch = ["--training.global_batch_size", str(MICRO_BATCHES * RANKS), "--training.local_batch_size", "1"]
    hsdp = ["--parallelism.data_parallel_replicate_degree", "2"]
    ways = [[*_sync("step"), *AC], [*_sync("step"), *hsdp], [*_sync("micro_batch"), *hsdp]]
    found = run_ranks(1, _collectives, tiny_config[0], [[*batch, *words] for words in ways])[0]
    alone, once, often = found
    groups = LAYERS + 2  # the embedding, each block, and the last norm with the head
    for way in (alone, once):
        assert way[GATHER] == way[REDUCE] == groups
    # The head's weights are always kept from the forward to the backward pass.
    assert often[GATHER] == 2 * MICRO_BATCHES * (groups - 1) + MICRO_BATCHES
    assert often[REDUCE] == MICRO_BATCHES * groups
    # PC's exchange is always once per step.
    assert once[EXCHANGE] == often[EXCHANGE] > 0
    # Without replicas: the check for finite steps.
    assert [way[ALL_REDUCE] - alone[ALL_REDUCE] for way in (once, often)] == [groups, groups]


def _held(rank, config, overrides) -> tuple[float, float]:
    """GiB that a step holds in addition between two micro-batches, and the estimate."""
    import gc

    from pc.shards import local
    from pc_recipe.config import load_config
    from pc_recipe.plan import memory
    from pc_recipe.train.trainer import Trainer

    def gib() -> float:
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not thing.is_meta)
        storages = {(storage := local(tensor).untyped_storage()).data_ptr(): storage.nbytes() for tensor in tensors}
        return sum(storages.values()) / memory.GIB

    class Measured(Trainer):
        held: list[float] = []

        def forward_backward_step(self, **batch):
            self.held.append(gib())
            return super().forward_backward_step(**batch)

    trainer = Measured(load_config(config, [*QUIET, *overrides]))
    trainer.metrics_processor.should_log = lambda step: False
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    sizes = memory.count_sizes(trainer.config)
    parts = memory.estimate_memory(trainer.config, trainer.parallel_dims, sizes)
    block = memory.BFLOAT16 * sizes.block / memory.GIB
    expected = parts["gathered"] - block + parts["gradients"]  # without a current block
    result = trainer.held[1] - trainer.held[0], expected
    trainer.close()
    return result


def test_memory_between_micro_batches_is_the_estimate(tiny_config):
    """Unsharded bfloat16 weights and float32 gradients, on one process and on two."""
    words = ["--training.mixed_precision_param", "bfloat16"]
    for ranks in (1, 2):
        held, expected = run_ranks(ranks, _held, tiny_config[0], words)[0]
        assert held == pytest.approx(expected, rel=0.02)

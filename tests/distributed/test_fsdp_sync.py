"""How often weights are gathered and gradients reduced (`parallelism.fsdp_sync`), and that results do not change."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor

from helpers import tiny
from helpers.collectives import Collectives
from helpers.ranks import run_ranks

MICRO_BATCHES, RANKS, LAYERS = 10, 8, 2
AC = ["--activation_checkpoint.mode", "full"]
QUIET = ["--validation.enable", "false", "--checkpoint.enable", "false"]


def _sync(way: str) -> list[str]:
    return ["--parallelism.fsdp_sync", way]


def _collectives(rank, config, cases) -> list[dict]:
    """Collectives of the second step for each case (a list of overrides), as the first of 8 fake ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pc.settings import load_config
    from pc.titan.trainer import PCTrainer

    tiny.add_tiny_flavor()
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    dist.new_group = lambda **_: None  # a gloo group would wait for the others
    results = []
    for overrides in cases:
        trainer = PCTrainer(load_config(config, [*QUIET, *overrides]))
        trainer.metrics_processor.should_log = lambda step: False
        trainer._agree_to_stop = lambda: False
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        trainer.train_step(batches)
        with Collectives() as collectives:
            trainer.train_step(batches)
        results.append(
            {"parameters": sum(p.numel() for p in trainer.model_parts[0].parameters()), **collectives.totals()}
        )
        trainer.close()
    return results


def test_collectives_of_a_step(tiny_config):
    """Ten micro-batches on a group of eight."""
    batch = ["--training.global_batch_size", str(MICRO_BATCHES * RANKS), "--training.local_batch_size", "1"]
    hsdp = ["--parallelism.data_parallel_replicate_degree", "2"]
    cases = {
        "micro-batch": _sync("micro_batch"),
        "step": _sync("step"),
        "step, AC": [*_sync("step"), *AC],
        "replicas": [*_sync("replicas_per_step"), *hsdp],
        "replicas, micro-batch": [*_sync("micro_batch"), *hsdp],
        "replicas, step": [*_sync("step"), *hsdp],
    }
    found = run_ranks(1, _collectives, tiny_config[0], [[*batch, *words] for words in cases.values()])[0]
    found = dict(zip(cases, found, strict=True))

    def calls(case: str, kind: str) -> int:
        return int(found[case][kind]["calls"])

    groups = LAYERS + 2  # the embedding, each block, and the last norm with the head
    # The head's weights are always kept from the forward to the backward pass.
    assert calls("micro-batch", "gather weights") == 2 * MICRO_BATCHES * (groups - 1) + MICRO_BATCHES
    assert calls("micro-batch", "reduce gradients") == MICRO_BATCHES * groups
    for case in ("step", "step, AC", "replicas, step"):
        assert calls(case, "gather weights") == calls(case, "reduce gradients") == groups
    # PC's exchange is always once per step.
    assert found["step"]["PC and Muon"]["calls"] == found["micro-batch"]["PC and Muon"]["calls"] > 0
    # A rank sends 7/8 of all parameters; each shard is padded to the rows of the first.
    assert found["step"]["gather weights"]["bytes"] == pytest.approx(4 * 7 / 8 * found["step"]["parameters"], rel=0.05)
    # Among replicas: TorchTitan's way, the least that HSDP should do, and once per step.
    # Without replicas: the checks for finite steps and, twice, for changed weights, which with replicas take one more.
    others = calls("step", "all-reduce") + 2
    replicas = {way: calls(f"replicas{way}", "all-reduce") - others for way in ("", ", micro-batch", ", step")}
    assert replicas == {"": groups, ", micro-batch": MICRO_BATCHES * groups, ", step": groups}
    assert calls("replicas", "reduce gradients") == MICRO_BATCHES * groups


def _held(rank, config, overrides) -> tuple[float, float, str]:
    """Additional GiB of a step between two micro-batches, the estimate, and the chosen way."""
    import gc

    from pc.owner import local
    from pc.settings import load_config
    from pc.titan import memory
    from pc.titan.trainer import PCTrainer

    def gib() -> float:
        gc.collect()
        tensors = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not thing.is_meta)
        storages = {(storage := local(tensor).untyped_storage()).data_ptr(): storage.nbytes() for tensor in tensors}
        return sum(storages.values()) / memory.GIB

    class Measured(PCTrainer):
        held: list[float] = []

        def forward_backward_step(self, **batch):
            self.held.append(gib())
            return super().forward_backward_step(**batch)

    tiny.add_tiny_flavor()
    trainer = Measured(load_config(config, [*QUIET, *overrides]))
    trainer.metrics_processor.should_log = lambda step: False
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    parts = memory.of_run(trainer.config, trainer.parallel_dims)
    block = memory.BFLOAT16 * memory.sizes_of_run(trainer.config).largest_block / memory.GIB
    expected = parts["gathered"] - block + parts["gradients"]  # without a current block
    result = trainer.held[1] - trainer.held[0], expected, trainer.sync
    trainer.close()
    return result


def test_memory_between_micro_batches_is_the_estimate(tiny_config):
    """Unsharded bfloat16 weights and float32 gradients, on one process and on two."""
    words = ["--training.mixed_precision_param", "bfloat16"]
    for ranks in (1, 2):
        held, expected, way = run_ranks(ranks, _held, tiny_config[0], words)[0]
        assert way == "step"  # by "auto"
        assert held == pytest.approx(expected, rel=0.02)


def _chosen(rank, config, cases) -> list[tuple[str, str]]:
    """For each case, overrides and a device's bytes: the chosen way and the logged warning."""
    import logging

    from torchtitan.distributed import ParallelDims

    from pc.settings import load_config
    from pc.titan import fsdp_sync

    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2)
    results = []
    for overrides, device_bytes in cases:
        said: list[str] = []
        fsdp_sync.logger = logging.Logger("test")
        fsdp_sync.logger.warning = said.append
        way = fsdp_sync.choose(load_config(config, overrides), dims, torch.device("cpu"), device_bytes[rank])
        results.append((way, " ".join(said)))
    return results


def test_the_way_follows_the_memory_of_the_smallest_device():
    config = Path(__file__).parents[2] / "train_configs" / "1b_adamw_pc.toml"
    small, large = 40 * 2**30, 80 * 2**30
    always = ["--parallelism.fsdp_reshard_after_forward", "always"]
    cases = [
        ([], (large, large)),
        ([], (large, small)),
        (_sync("step"), (large, small)),
        (_sync("micro_batch"), (large, large)),
        (always, (large, large)),
    ]
    for found in run_ranks(2, _chosen, config, cases):
        assert [way for way, _ in found] == ["step", "replicas_per_step", "step", "micro_batch", "replicas_per_step"]
        warned = [warning for _, warning in found]
        assert "of 40.0 GiB" in warned[1] and 'fsdp_sync = "step" does it anyway' in warned[1]
        assert 'fsdp_sync = "step" may not fit' in warned[2]
        assert warned[0] == warned[3] == warned[4] == ""

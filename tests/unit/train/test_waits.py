"""What a step does besides the model, PC and the optimizer, on a fake GPU: operations, exchanges, and waits of the host."""

import contextlib
import sys
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchtitan.train
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import pretended_cuda, tiny
from helpers.ranks import run_ranks
from pc_recipe.train.trainer import Trainer

RANKS, MICRO_BATCHES = 8, 3
LOGGED = ["--metrics.log_freq=1", "--diagnostics.freq=1"]
UNLOGGED = ["--metrics.log_freq=1000", "--diagnostics.freq=1000"]
# 81 weights, so that one operation for each would show
WORDS = f"""--model.n_layers=6 --validation.enable=false --checkpoint.enable=false --optimizer.implementation=fused
    --training.local_batch_size=1 --training.global_batch_size={RANKS * MICRO_BATCHES}""".split()


@contextlib.contextmanager
def _on_a_fake_gpu():
    """Allow a trainer on a fake GPU: leave out what needs values of tensors, or CUDA's streams and generators."""
    import torchtitan.distributed
    import torchtitan.tools.utils as utils

    from pc_recipe.train import cpu, llama2

    def with_a_device():
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtitan"):
                for key, value in {"device_type": "cuda", "device_module": cpu.CPU_MODULE}.items():
                    if hasattr(module, key):
                        setattr(module, key, value)
        utils.get_peak_flops = torchtitan.components.metrics.utils.get_peak_flops = lambda _: 1.0

    def gather(of_ranks, own, group=None):
        of_ranks[:] = [own] * len(of_ranks)

    def without_fakes(function):
        def called(*args):
            with unset_fake_temporarily():
                return function(*args)

        return called

    dims = torchtitan.distributed.ParallelDims
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (cpu, "use_cpu_where_there_is_no_gpu", with_a_device),
            (llama2, "draw_parameter", lambda *_: None),
            (torchtitan.distributed.utils, "set_determinism", lambda *_, **__: None),
            (dims, "build_mesh", without_fakes(dims.build_mesh)),
            (dist, "all_gather_object", gather),
            (dist, "new_group", lambda *_, **__: None),
            (torch.cuda, "current_device", lambda: 0),
            *((torch.cuda, name, mock.MagicMock()) for name in ("Stream", "Event", "stream", "current_stream")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(pretended_cuda.Counted())


def _backward(trainer, **_):
    """Replaces the model's passes, which torch refuses without a GPU."""
    for model in trainer.model_parts:
        for name, parameter in model.named_parameters():
            if not name.endswith(("orig", "gamma")):  # `pull_back` sets their gradients
                parameter.grad = torch.empty_like(parameter)
    return torch.zeros((), device=trainer.device)


def _count(counted, config, overrides, train_step) -> dict[str, Counter]:
    """Counts of a trainer's second step, without the passes of the model and of PC, clipping and the optimizer."""
    with counted.without():
        trainer = tiny.make_trainer(config, [*WORDS, *overrides])
        left_out = [(trainer, "_clip"), *((optimizer, "step") for optimizer in trainer.optimizers.optimizers)]
        if trainer.preconditioner is not None:
            left_out += [(trainer.preconditioner, name) for name in ("pull_back", "_write")]
        for owner, name in left_out:
            setattr(owner, name, counted.without()(getattr(owner, name)))
        batches = trainer.batch_generator(trainer.dataloader)
        trainer.step = 1
        train_step(trainer, batches)
    for counter in counted.counters.values():
        counter.clear()
    trainer.step = 2
    train_step(trainer, batches)
    counts = {kind: dict(+counter) for kind, counter in counted.counters.items()}
    with counted.without():
        trainer.close()
    return counts


def _measure(rank, config) -> dict:
    """Counts of steps, and as a control those of TorchTitan's own step."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    ours, theirs = Trainer.train_step, torchtitan.train.Trainer.train_step
    with pretended_cuda.pretended_cuda(), _on_a_fake_gpu() as counted:
        torchtitan.train.Trainer.forward_backward_step = counted.without()(_backward)
        return {
            "logged": _count(counted, config, LOGGED, ours),
            "unlogged": _count(counted, config, UNLOGGED, ours),
            "TorchTitan's": _count(counted, config, [*LOGGED, "--pc.enable=false"], theirs),
        }


@pytest.mark.skipif(not pretended_cuda.COMPILER, reason="needs g++")
def test_counts_of_a_step(tiny_config):
    found = run_ranks(1, _measure, tiny_config[0])[0]
    counts = {name: {kind: sum(of.values()) for kind, of in kinds.items()} for name, kinds in found.items()}
    assert [counts[name]["waits"] for name in ("logged", "unlogged")] == [2, 1], found
    assert [counts[name]["exchanges"] for name in ("logged", "unlogged")] == [2, 1], found
    # without two copies for each micro-batch, of inputs and labels, as in any step
    assert counts["logged"]["operations"] - 2 * MICRO_BATCHES <= 30, found
    # control: it waits for copies of batches, valid tokens, loss, largest loss, all tokens and norm
    assert counts["TorchTitan's"]["waits"] >= 2 * MICRO_BATCHES + 5, found
    assert counts["TorchTitan's"]["exchanges"] == 5, found

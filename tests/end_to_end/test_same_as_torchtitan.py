"""This trainer's baseline against TorchTitan's own trainer, parallelisation, optimizer and schedule, step by step."""

import dataclasses

import pytest
import torch

from helpers import tiny
from helpers.ranks import run_ranks

STEPS = 20
OVERRIDES = [
    *("--pc.enable", "false", "--validation.enable", "false", "--checkpoint.enable", "false"),
    *("--training.steps", str(STEPS), "--lr_scheduler.warmup_steps", "5"),
]


def _twenty_steps(rank, config, kind) -> dict[str, torch.Tensor]:
    """Losses and gradient norms by step, and the weights after the last."""
    import torchtitan.train
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.metrics import build_metrics_processor
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.protocols.train_spec import register_train_spec

    from pc.settings import load_config
    from pc.titan import cpu
    from pc.titan.job_config import JobConfig
    from pc.titan.trainer import TRAIN_SPEC, PCTrainer

    def parallelize(model, *args):
        model = parallelize_llama(model, *args)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        return model

    cpu.use_cpu_where_there_is_no_gpu()
    tiny.add_tiny_flavor()
    upstream = dataclasses.replace(
        TRAIN_SPEC,  # ours provides initial weights, sizes and data
        parallelize_fn=parallelize,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_metrics_processor_fn=build_metrics_processor,
        build_loss_fn=build_cross_entropy_loss,
    )
    register_train_spec("upstream", upstream)
    name = "upstream" if kind == "torchtitan" else "pc_llama2"
    loaded = load_config(config, OVERRIDES)
    loaded.model.name = name
    trainer = torchtitan.train.Trainer(JobConfig(loaded)) if kind == "torchtitan" else PCTrainer(loaded)
    steps = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, *_, **__: steps.append((float(loss), float(norm)))
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, STEPS + 1):
        trainer.step = step
        trainer.train_step(batches)
    weights = tiny.state_of(trainer)
    trainer.close()
    return {"steps": torch.tensor(steps, dtype=torch.float64), **weights}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_baseline_is_torchtitans(tiny_config, ranks):
    """On one rank bit for bit. On two, this trainer reduces gradients once per step and TorchTitan for every
    micro-batch. That changes the order of float32 sums: 2e-6 after twenty steps."""
    config, _ = tiny_config
    ours, theirs = (run_ranks(ranks, _twenty_steps, config, kind)[0] for kind in ("ours", "torchtitan"))
    assert len(ours["steps"]) == STEPS and ours.keys() == theirs.keys()
    worst = max(((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()).item() for k in ours)
    print(f"{ranks} ranks: largest relative difference {worst:.1e}")
    assert worst <= (0 if ranks == 1 else 1e-5)
    assert ours["steps"][-1, 0] < 0.95 * ours["steps"][0, 0]  # they did learn

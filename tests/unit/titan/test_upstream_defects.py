"""Defects of TorchTitan 0.2.2 that this project works around. A failure here says that upstream has mended one:
then its workaround can go."""

import dataclasses

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import tiny
from ranks import run_ranks

TOKENS = 24 * 16  # of one step of the tiny config

COMMON = ["--pc.enable", "false", "--validation.enable", "false", "--checkpoint.enable", "false"]
PP2 = ["--parallelism.pipeline_parallel_degree", "2"]
DDP2 = ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]


def _upstream(rank, config, cases, model=None) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """Upstream's trainer and parallelisation, for each case, a list of overrides: the norm of the first step's
    gradients, the loss that this rank logs, and the initial weights on this rank.

    model: None is ours, whose initial weights depend on no layout; "upstream" is TorchTitan's.
    """
    import torchtitan.train
    from torchtitan.distributed import utils
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.protocols.train_spec import register_train_spec

    from pc.titan.train import TRAIN_SPEC, load_config

    def parallelize(model, *args):
        model = parallelize_llama(model, *args)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        return model

    tiny.add_tiny_flavor()
    spec = dataclasses.replace(TRAIN_SPEC, parallelize_fn=parallelize)
    register_train_spec("upstream", dataclasses.replace(spec, model_cls=Transformer) if model else spec)
    clip, results = utils.clip_grad_norm_, []

    def recorded(*args, **kwargs):
        norms.append(clip(*args, **kwargs))
        return norms[-1]

    utils.clip_grad_norm_ = recorded
    for overrides in cases:
        norms, losses = [], []
        trainer = torchtitan.train.Trainer(load_config(config, [*COMMON, "--model.name", "upstream", *overrides]))
        weights = tiny.state_of(trainer)
        trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(loss)
        trainer.step = 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        results.append((float(norms[0]), float(losses[0]), weights))
        trainer.close()
    return results


@pytest.fixture(scope="module")
def on_two_ranks(tiny_shards, tmp_path_factory):
    """Results of rank 0 by layout; all start from the same weights and see the same step."""
    folder = tmp_path_factory.mktemp("upstream")
    config = tiny.write_config(folder / "tiny.toml", tiny_shards, folder / "run")
    return dict(zip(("fsdp", "pp", "ddp"), run_ranks(2, _upstream, config, [[], PP2, DDP2])[0], strict=True))


def test_gradients_under_pipeline_parallelism_are_not_divided_by_the_tokens(on_two_ranks):
    """Our division: `PCTrainer._finish_gradients`."""
    assert on_two_ranks["pp"][0] / on_two_ranks["fsdp"][0] == pytest.approx(TOKENS, rel=1e-5)


def test_plain_data_parallelism_divides_gradients_twice(on_two_ranks):
    """Our refusal: `pc.titan.checks`."""
    assert on_two_ranks["ddp"][0] / on_two_ranks["fsdp"][0] == pytest.approx(1 / 2, rel=1e-5)


def test_first_pipeline_stage_logs_minus_one_as_its_loss(on_two_ranks):
    """Our sum over stages: `PCTrainer._loss_of_all_stages`."""
    assert on_two_ranks["pp"][1] == -12  # one for each micro-batch
    assert on_two_ranks["fsdp"][1] == pytest.approx(5.7, abs=0.1)  # ln 200 and a little


def test_initial_weights_depend_on_the_layout(tiny_config):
    """Our `Llama2.init_weights` draws by name."""
    config, _ = tiny_config
    ((*_, alone),) = run_ranks(1, _upstream, config, [[]], "upstream")[0]
    by_rank = run_ranks(2, _upstream, config, [PP2, []], "upstream")
    last_stage = by_rank[1][0][2]
    name = "layers.1.attention.wq.weight"
    assert not torch.equal(last_stage[name], alone[name])  # pipeline stages draw other numbers
    sharded = by_rank[0][1][2][name]
    assert torch.equal(sharded[:12], sharded[12:])  # on a CPU all ranks draw the same shard
    assert not torch.equal(alone[name][:12], alone[name][12:])

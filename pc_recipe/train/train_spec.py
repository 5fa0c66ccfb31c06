"""What TorchTitan's trainer calls to make a run: this package's functions, given the run's `Config`."""

from typing import Any

from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from pc_recipe.config import Config
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.train.llama2 import Llama2, Llama2Args
from pc_recipe.train.metrics import PCMetricsProcessor
from pc_recipe.train.optimizers import Optimizers, build_schedulers
from pc_recipe.train.parallelize import parallelize
from pc_recipe.train.validate import FixedValidator

# TorchTitan passes its own configuration to these; its attribute `ours` is the run's (`pc_recipe.train.upstream_config`).


def _build_dataloader(job_config: Any, dp_rank: int, dp_world_size: int, tokenizer: None) -> Any:
    """Shards in global order."""
    config: Config = job_config.ours
    return GlobalOrderLoader(
        config.data.folders,
        "train",
        seed=config.data.seed,
        skip=config.data.skip,
        seq_len=config.training.seq_len,
        local_batch_size=config.training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        vocab_size=config.model.vocab_size,
        pin_memory=config.training.dataloader.pin_memory,
    )


def _build_validator(job_config: Any, dp_rank: int, dp_world_size: int, **_) -> Any:
    return FixedValidator(job_config.ours, dp_rank, dp_world_size)


class _AnySize(dict):
    """New arguments for any size; `Llama2Args.update_from_config` fills them in."""

    def __missing__(self, _: str) -> Llama2Args:
        return Llama2Args()


TRAIN_SPEC = TrainSpec(
    model_cls=Llama2,
    model_args=_AnySize(),
    parallelize_fn=parallelize,
    pipelining_fn=pipeline_llm,
    build_optimizers_fn=lambda model_parts, titan, dims: Optimizers(model_parts, titan.ours),
    build_lr_schedulers_fn=build_schedulers,  # type: ignore[arg-type]  # takes the optimizers made above
    build_dataloader_fn=_build_dataloader,
    build_tokenizer_fn=None,
    build_loss_fn=build_cross_entropy_loss,
    build_validator_fn=_build_validator,
    build_metrics_processor_fn=lambda titan, dims, model_args: PCMetricsProcessor(titan, dims),
    state_dict_adapter=Llama3StateDictAdapter,
)
register_train_spec("pc_llama2", TRAIN_SPEC)

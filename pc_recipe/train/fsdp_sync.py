"""When FSDP all-gathers weights and reduce-scatters gradients: for every micro-batch, or once per optimizer step.

Weights change once per step and gradients accumulate over it, so one all-gather and one reduce-scatter are enough.
Between them a rank holds the unsharded weights and float32 gradients of its model part. `parallelism.fsdp_sync`:

"step"          both once per step
"micro_batch"   both for every micro-batch, as TorchTitan does: less memory

Replicas (HSDP) reduce once per step in both, which needs no extra memory. With one process there is no communication,
and "step" saves copies. In a pipeline, torch's schedules decide.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from pc_recipe.config.schema import Parallelism


def prepare_micro_batch(model_parts: Iterable[nn.Module], parallelism: Parallelism, is_last: bool) -> None:
    """Set what the backward passes from now on do. Call it before a step's first micro-batch and before its last, but not
    in a pipeline, which does so itself.

    Args:
        is_last: whether the next is the step's last micro-batch, after which gradients are complete and weights sharded.
    """
    # FSDP's backward pass ends with a reduce-scatter among the ranks that share a replica and, with replicas (HSDP), an
    # all-reduce among these. Both are sums, so they may wait for the last micro-batch; until then gradients add up where
    # they are. The all-reduce is of shards, so waiting costs no memory, and is done in both settings. A later
    # reduce-scatter keeps whole gradients until then; weights that are not resharded stay whole, which saves the next
    # all-gather.
    for model in model_parts:
        assert isinstance(model, FSDPModule)
        if parallelism.syncs_once_per_step:
            model.set_requires_gradient_sync(is_last)  # of reduce-scatter and all-reduce
            model.set_reshard_after_backward(is_last)
        else:
            model.set_requires_all_reduce(is_last)

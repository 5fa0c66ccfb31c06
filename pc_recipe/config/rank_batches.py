"""A config on a number of GPUs: parallel degrees, micro-batches and tokens per step.

The global batch is fixed, so fewer GPUs accumulate more micro-batches."""

from dataclasses import dataclass

from pc.errors import UserError
from pc_recipe.config.schema import Config, Training


@dataclass(frozen=True)
class Degrees:
    """Numbers of ranks; TorchTitan's ParallelDims has the same attributes and can be used instead."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    world_size: int


@dataclass(frozen=True)
class RankBatches:
    """How a step's batch is distributed over ranks."""

    dims: Degrees
    training: Training

    @classmethod
    def of(cls, config: Config, world_size: int) -> "RankBatches":
        """Distribute a config over `world_size` GPUs; `data_parallel_shard_degree` -1 takes the remaining GPUs.

        Raises:
            UserError: the degrees do not fit the number of GPUs.
        """
        p = config.parallelism
        model_parallel = p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
        if world_size < 1 or world_size % model_parallel:
            raise UserError(
                f"{world_size} GPUs are not a multiple of tensor_parallel_degree x pipeline_parallel_degree x "
                f"context_parallel_degree = {model_parallel}"
            )
        data_ranks = world_size // model_parallel
        replicas, shards = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
        shards = data_ranks // replicas if shards == -1 else shards
        if replicas * shards != data_ranks:
            raise UserError(
                f"parallelism.data_parallel_replicate_degree {replicas} x data_parallel_shard_degree {shards} "
                f"should be {data_ranks} on {world_size} GPUs; data_parallel_shard_degree = -1 fits automatically"
            )
        dims = Degrees(
            dp_replicate=replicas,
            dp_shard=shards,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            world_size=world_size,
        )
        return cls(dims, config.training)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different data."""
        return self.dims.dp_replicate * self.dims.dp_shard

    @property
    def fsdp_ranks(self) -> int:
        """Number of ranks that FSDP shards a parameter over."""
        return self.dims.dp_shard * self.dims.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step and data-parallel rank; raises UserError if it is not a whole number."""
        batch, size, ranks = self.training.global_batch_size, self.training.local_batch_size, self.data_ranks
        if size == -1:
            raise UserError("training.local_batch_size = -1 is chosen by ./run_llama_train.sh; give a number here")
        per_pass = size * ranks
        if batch == -1:
            return 1
        if batch % per_pass == 0:
            return batch // per_pass
        below = batch // per_pass * per_pass
        fits = f"global_batch_size {below} or {below + per_pass}" if below else f"global_batch_size {per_pass}"
        if batch % ranks == 0:
            fits += f"; or a local_batch_size that divides {batch // ranks}"
        raise UserError(
            f"training.global_batch_size = {batch} is not a multiple of local_batch_size {size} x {ranks} data-parallel "
            f"rank(s). Nearest that fit: {fits}"
        )

    def micro_batch_sizes(self) -> list[int]:
        """Sequences per micro-batch that divide the global batch, in ascending order.

        Raises:
            UserError: there is no global batch, the ranks do not divide it, or there is a pipeline.
        """
        batch, ranks = self.training.global_batch_size, self.data_ranks
        if batch == -1 or self.dims.pp > 1:
            why = "needs training.global_batch_size, which is -1" if batch == -1 else "does not work with pipelines"
            raise UserError(f"training.local_batch_size = -1 {why}; give a number")
        if batch % ranks:
            tp = next(tp for tp in range(2, ranks + 1) if ranks % tp == 0 and batch % (ranks // tp) == 0)
            raise UserError(
                f"training.global_batch_size = {batch} is not a multiple of {ranks} data-parallel ranks; "
                f"parallelism.tensor_parallel_degree = {tp * self.dims.tp} leaves {ranks // tp} of them"
            )
        return [size for size in range(1, batch // ranks + 1) if batch // ranks % size == 0]

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batches * self.training.local_batch_size * self.data_ranks

    @property
    def tokens(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.sequences * self.training.seq_len

"""Score the model during training, at an interval, on a few tasks: section `[evaluation]`.

The weights are used in place, as they are sharded; nothing is gathered, converted or written. The states of random
number generators are restored, so scoring does not change the losses.
"""

import random
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn
from torchtitan.distributed import ParallelDims

from pc_recipe.config import Config
from pc_recipe.data.manifest import Manifest
from pc_recipe.evaluate import tasks
from pc_recipe.evaluate.log_likelihoods import LogLikelihoods


class InTrainingScorer:
    """Call `score` on every rank at steps for which `is_due` is true.

    Args:
        model_parts: the trainer's model, one part.
        device: where token ids go.
        precision: the trainer's autocast context.
    """

    def __init__(
        self,
        config: Config,
        model_parts: list[nn.Module],
        parallel_dims: ParallelDims,
        device: torch.device,
        precision: AbstractContextManager | None = None,
    ) -> None:
        section = self._section = config.evaluation
        # Loaded now, so that a missing file or an unreachable Hub stops the run at its start.
        self._tasks = tasks.load(section.tasks, section.data or None)
        self._model = model_parts[0]
        batch_mesh = parallel_dims.get_optional_mesh("batch")
        self.lm = LogLikelihoods(
            self._model,
            Manifest.read(next(iter(config.data.folders))).load_tokenizer().to_transformers(),
            max_length=config.training.seq_len,
            batch_size=config.validation.local_batch_size,  # of sequences at least as long
            device=device,
            data_group=batch_mesh.get_group() if batch_mesh is not None else None,
            precision=precision,
            quiet=True,
        )

    def is_due(self, step: int) -> bool:
        return step % self._section.interval == 0

    def score(self) -> dict[str, float]:
        """`{"evaluation/<task>/<metric>": value}` and the average over tasks, the same on every rank."""
        generators = random.getstate(), np.random.get_state()  # lm-eval draws from these
        self._model.eval()
        try:
            results = tasks.score(self.lm, self._tasks, self._section.limit or None)
        finally:
            self._model.train()
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        named = ((name, tasks.METRICS[name], result) for name, result in results.items())
        scores = {f"evaluation/{name}/{metric}": result[metric] for name, metric, result in named}
        return scores | {"evaluation/average": sum(scores.values()) / len(scores)}

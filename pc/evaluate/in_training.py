"""Score the model while it trains, every so many steps, on a few tasks: the `[evaluation]` section.

The weights are used where they lie, sharded as they are; nothing is gathered, converted or written.
Random number generators are left as they were, so a run with scoring gives the same losses as one without.
"""

import random
from contextlib import AbstractContextManager

import lm_eval
import numpy as np
import torch
from lm_eval.tasks.manager import TaskDict
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from pc.evaluate import hf_tokenizer, tasks
from pc.evaluate.live_model import LiveModel
from pc.titan.config import JobConfig


class InTrainingScorer:
    """Call `score` on every rank at steps for which `due` is true.

    Args:
        lm: the live model.
        task_dict: tasks with their documents (`pc.evaluate.tasks.load`).
        limit: items per task; None for all.
        interval: steps from one scoring to the next.
    """

    def __init__(self, lm: LiveModel, task_dict: TaskDict, limit: int | None, interval: int) -> None:
        self._lm = lm
        self._tasks = task_dict
        self._limit = limit
        self._interval = interval

    def due(self, step: int) -> bool:
        return step % self._interval == 0

    def score(self) -> dict[str, float]:
        """`{"evaluation/<task>/<metric>": value}` and the average over tasks, the same on every rank."""
        generators = random.getstate(), np.random.get_state()  # lm-eval draws from these
        found = lm_eval.evaluate(self._lm, self._tasks, limit=self._limit, bootstrap_iters=0, log_samples=False)
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        names = list(self._tasks["tasks"])
        metrics = {name: float(found["results"][name][f"{tasks.METRICS[name]},none"]) for name in names}
        scores = {f"evaluation/{name}/{tasks.METRICS[name]}": value for name, value in metrics.items()}
        return scores | {"evaluation/average": sum(metrics.values()) / len(metrics)}


def build_in_training_scorer(
    job_config: JobConfig,
    model_parts: list[nn.Module],
    parallel_dims: ParallelDims,
    device: torch.device,
    precision: AbstractContextManager | None = None,
) -> InTrainingScorer:
    """The scorer that `[evaluation]` asks for.

    Args:
        job_config: the run's configuration.
        model_parts: the trainer's model, one part.
        parallel_dims: the trainer's meshes.
        device: where token ids go.
        precision: the trainer's autocast context.
    """
    section = job_config.evaluation
    # Loaded now: a missing file or an unreachable Hub stops the run at its start.
    task_dict = tasks.load(section.tasks, section.data or None)
    for name in section.tasks:
        if variant := tasks.variant_of(name, section.data or None):
            logger.warning(f"{name} in {section.data} is another set than lm-eval's: {variant}")
    batch_mesh = parallel_dims.get_optional_mesh("batch")
    lm = LiveModel(
        model_parts[0],
        hf_tokenizer.of_run(job_config.data),
        max_length=job_config.training.seq_len,
        batch_size=job_config.validation.local_batch_size,  # of sequences at least as long
        device=device,
        data_group=batch_mesh.get_group() if batch_mesh is not None else None,
        precision=precision,
    )
    return InTrainingScorer(lm, task_dict, section.limit or None, section.interval)

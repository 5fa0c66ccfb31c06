"""The log names a slow rank, though all ranks' steps take equally long."""

import logging
import time

import pytest

from helpers.ranks import run_ranks
from helpers.tiny import make_trainer

WORDS = "--training.steps=5 --training.global_batch_size=4 --metrics.log_freq=5 --validation.enable=false"
OUTPUT, SLOWER = 0.2, 0.1  # seconds in the output layer; 10 % of five times the first is more than a busy machine adds
LOADING = 0.5  # of the time since the previous batch, so it grows with a busy machine


def _warnings(rank, config, folder, slow):
    """This rank's warnings in a run whose rank 1 takes longer to load data or to compute."""
    from pc_recipe.train import metrics

    metrics.SECONDS_BETWEEN_SLOW_RANKS = 0.0
    trainer = make_trainer(config, [*WORDS.split(), "--checkpoint.enable=false", f"--job.dump_folder={folder}"])
    late = {slow: SLOWER if rank == 1 else 0.0}
    trainer.model_parts[0].output.register_forward_hook(lambda *_: time.sleep(OUTPUT + late.get("output", 0.0)))
    batches = trainer.dataloader.__iter__

    def loaded():
        before = time.monotonic()
        for batch in batches():
            time.sleep(LOADING * (time.monotonic() - before) if "loading" in late and rank == 1 else 0.0)
            before = time.monotonic()
            yield batch

    type(trainer.dataloader).__iter__ = lambda _: loaded()
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    metrics.logger.addHandler(handler)
    trainer.train()
    trainer.close()
    return [line for line in lines if "is slow" in line]


@pytest.mark.parametrize("slow", ["loading", "output", "neither"])
def test_the_slow_rank_is_named_in_the_log(tiny_config, tmp_path, slow):
    found, of_others = run_ranks(2, _warnings, tiny_config[0], tmp_path, slow)
    work = {"loading": ["loading data"], "output": ["the output layer and the loss"], "neither": []}[slow]
    assert of_others == [] and len(found) == len(work)
    assert all(line.startswith("Rank 1 is slow") and part in line for line, part in zip(found, work, strict=True))

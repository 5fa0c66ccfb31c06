"""A checkpoint is due on all ranks in the same step, and the right ones are kept."""

import time

from helpers.ranks import run_ranks
from helpers.tiny import make_trainer, train, write_config
from pc_recipe.files.run_folder import list_checkpoints

WORDS = "--checkpoint.interval=7 --checkpoint.minutes=1 --training.steps=16 --validation.enable=false".split()


def _train(rank, config):
    """A step takes 25 seconds by rank 1's clock and none by rank 0's."""
    trainer = make_trainer(config, WORDS)
    time.monotonic = lambda: 25.0 * rank * trainer.step
    trainer.checkpointer._saved_at = 0.0
    trainer.train()


def test_a_checkpoint_is_due_by_minutes_or_by_steps(tmp_path, tiny_shards):
    config = write_config(tmp_path / "run.toml", tiny_shards, tmp_path / "run")
    run_ranks(2, _train, config)
    # three steps after the last save, when all ranks learn of it; 7 and 14 by the interval; 16 is the last step
    assert list(list_checkpoints(tmp_path / "run" / "checkpoint")) == [3, 6, 7, 10, 13, 14, 16]


def test_the_newest_and_the_milestones_stay(tmp_path, tiny_shards):
    """Folders that are not named step-N are not checkpoints, and stay too."""
    config, folder = write_config(tmp_path / "run.toml", tiny_shards, tmp_path / "run"), tmp_path / "run" / "checkpoint"
    others = ["step-2.kept", "best-step-1", "step-40.bad", "step-007", "notes"]
    for name in others:
        (folder / name).mkdir(parents=True)
    words = "--checkpoint.interval=2 --checkpoint.keep_every=3 --checkpoint.keep_latest_k=2 --validation.enable=false"
    run_ranks(1, train, config, [*words.split(), "--training.steps=11"])
    # the last save deletes nothing
    assert {path.name for path in folder.iterdir()} == {*map("step-{}".format, (3, 6, 9, 10, 11)), *others}

"""A run on a mixture of folders: resumed on another number of ranks it trains on the same sequences."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import tiny
from helpers.ranks import run_ranks
from pc_recipe.data.tokenizing import tokenize


def test_a_mixture_resumed_on_other_ranks(tiny_config, tiny_shards, tmp_path):
    config, _ = tiny_config
    texts = [f"{'abcdefgh'[i % 8]} hhh gg {i}" * 8 for i in range(120)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "books.parquet")
    books = tokenize(
        str(tmp_path / "books.parquet"), tmp_path / "books", tokenizer=str(tiny_shards / "tokenizer"),
        validation_fraction=0.3,
    ).folder  # fmt: skip
    mixture = f'--data.path={{"{tiny_shards}" = 0.75, "{books}" = 0.25}}'
    # A step adds two micro-batches of one sequence, on one rank or on two, which is the same sum. Nothing is clipped,
    # because a norm is summed over shards. So losses are equal to the last digit.
    batch = ["--training.local_batch_size=1", "--training.global_batch_size=2", "--training.max_norm=1e6"]
    words = [mixture, "--model.vocab_size=200", "--lr_scheduler.total_steps=6", *batch]
    straight, resumed = ([*words, f"--job.dump_folder={tmp_path}/{name}"] for name in ("straight", "resumed"))
    (expected,) = run_ranks(1, _sequences_of_steps, config, straight)
    first = run_ranks(2, _sequences_of_steps, config, [*resumed, "--training.steps=3"])
    (rest,) = run_ranks(1, _sequences_of_steps, config, resumed)
    of_both = [a + b for a, b in zip(*first, strict=True)]  # both ranks' micro-batches, in another order
    assert list(map(sorted, of_both + rest)) == list(map(sorted, expected)) and len(rest) == 3
    for key in ("loss", "validation_loss", "validation_loss/shards", "validation_loss/books"):
        assert tiny.metrics(tmp_path / "resumed", key) == tiny.metrics(tmp_path / "straight", key)
    whole, web, of_books = (
        tiny.metrics(tmp_path / "straight", f"validation_loss{name}") for name in ("", "/shards", "/books")
    )
    assert whole == pytest.approx([0.75 * a + 0.25 * b for a, b in zip(web, of_books, strict=True)], rel=1e-12)
    with pytest.raises(AssertionError, match=r"was made with data.path \(its content\) = 0.[27]5 of"):
        other = mixture.replace("0.75", "0.6")
        run_ranks(1, tiny.train, config, [other, *resumed[1:], "--training.steps=9", "--lr_scheduler.total_steps=9"])


def _sequences_of_steps(rank, config, overrides) -> list[list[tuple[int, ...]]]:
    """The sequences of this rank in each step."""
    trainer = tiny.make_trainer(config, overrides)
    steps, real = [], trainer.dataloader.__class__.__iter__

    def recorded(loader):
        for batch in real(loader):
            if loader is trainer.dataloader:
                steps[-1].extend(tuple(row) for row in batch[0]["input"].tolist())
            yield batch

    step = trainer.train_step
    trainer.train_step = lambda data: (steps.append([]), step(data))
    trainer.dataloader.__class__.__iter__ = recorded
    trainer.train()
    trainer.close()
    return steps

"""Streaming: the same packing as shards, a correct or refused resume, and a warning at the start."""

import logging

import pytest
import torch

from pc.data import build_streaming_dataloader, load_tokenizer
from pc.errors import UserError
from pc.titan.config import JobConfig
from pc.titan.validate import FixedValidator


@pytest.fixture
def build(parquet_folder):
    def build(**kwargs):
        settings = dict(
            dataset=str(parquet_folder),
            tokenizer="mistral-common",
            seq_len=32,
            local_batch_size=2,
            dp_rank=0,
            dp_world_size=1,
            seed=0,
            vocab_size=32000,
        )
        return build_streaming_dataloader(**settings | kwargs)

    return build


def take(loader, count: int) -> list:
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def equal(one, other) -> bool:
    return torch.equal(one[0]["input"], other[0]["input"]) and torch.equal(one[1], other[1])


def documents_of(batches: list) -> list[str]:
    """The documents that are completely within the batches."""
    tokenizer = load_tokenizer("mistral-common")
    stream = torch.cat([labels.flatten() for _, labels in batches]).tolist()
    ends = [i for i, token in enumerate(stream) if token == tokenizer.eos_id]
    return [tokenizer.decode(stream[a + 2 : b]) for a, b in zip(ends, ends[1:], strict=False)]


def test_sequences_hold_whole_documents_each_once(build, make_texts):
    every = [text for seed in range(5) for text in make_texts(80, seed)]
    tokenizer = load_tokenizer("mistral-common")
    batches = take(build(), 150)
    for (inputs, labels), (following, _) in zip(batches, batches[1:], strict=False):
        stream = torch.cat([inputs["input"].flatten(), following["input"].flatten()[:1]])
        assert torch.equal(stream[1:], labels.flatten())
    seen = documents_of(batches)
    assert len(seen) > 100 and len(seen) == len(set(seen))
    assert set(seen) <= {tokenizer.decode(tokenizer.encode(text)) for text in every}


def test_resume_goes_on_with_the_next_sequence(build):
    straight = take(build(), 10)
    first = build()
    take(first, 4)
    second = build()
    second.load_state_dict(first.state_dict())
    assert all(equal(a, b) for a, b in zip(take(second, 6), straight[4:], strict=True))


def test_ranks_read_different_documents(build):
    a, b = (set(documents_of(take(build(dp_rank=rank, dp_world_size=2), 60))) for rank in range(2))
    assert len(a) > 30 and len(b) > 30 and not a & b


def test_seed_changes_the_order(build):
    a, b, again = (documents_of(take(build(seed=seed), 20)) for seed in (0, 1, 0))
    assert a == again != b


def test_end_of_the_stream_begins_it_again(build, caplog):
    with caplog.at_level(logging.WARNING):
        batches = take(build(seq_len=512), 60)
    assert len(batches) == 60 and "reads it again" in caplog.text


def test_limits_are_said_at_the_start(build, caplog):
    with caplog.at_level(logging.WARNING):
        build(dp_rank=1, dp_world_size=2)
        assert not caplog.text
        build()
    assert "quick experiments" in caplog.text and "reads and tokenises the stream again from its start" in caplog.text


def test_what_cannot_be_continued_is_refused(build):
    state = build().state_dict()
    with pytest.raises(UserError, match="number of data-parallel ranks = 1, this run has 2"):
        build(dp_world_size=2).load_state_dict(state)


def test_user_mistakes(build, tmp_path, write_parquet):
    with pytest.raises(UserError, match="model's vocabulary has 100"):
        build(vocab_size=100)
    write_parquet(tmp_path / "other" / "x.parquet", ["x"], column="content")
    with pytest.raises(UserError, match="no column 'text'; it has id, content"):
        take(build(dataset=str(tmp_path / "other")), 1)
    write_parquet(tmp_path / "tiny" / "x.parquet", ["x"])
    with pytest.raises(UserError, match="too little text"):
        take(build(dataset=str(tmp_path / "tiny")), 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="data.streaming = .* cannot be read"):
        build(dataset=str(tmp_path / "empty"))


def test_validation_of_another_tokenizer_is_refused(tiny_shards):
    """Its loss would be that of tokens that the model has never seen in training."""
    config = JobConfig()
    config.data.path, config.data.streaming = str(tiny_shards), "owner/name"
    with pytest.raises(UserError, match="the stream with 'mistral-common'; one run needs one tokenizer"):
        FixedValidator(config, 1, 0, *[None] * 6)
    config.data.tokenizer = str(tiny_shards / "tokenizer")
    config.training.seq_len = 16
    FixedValidator(config, 1, 0, *[None] * 6)

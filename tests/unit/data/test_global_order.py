"""One global order of sequences for any number of ranks, and resume with exactly the next sequence."""

import logging
import random

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from pc.data import build_dataloader
from pc.data.loader import IGNORED_LABEL
from pc.data.shards import TokenStream
from pc.errors import UserError

SEQ_LEN = 24


@pytest.fixture
def build(shards):
    def build(**kwargs):
        settings = dict(
            split="train",
            seq_len=SEQ_LEN,
            local_batch_size=4,
            dp_rank=0,
            dp_world_size=1,
            seed=3,
            vocab_size=32000,
            infinite=True,
        )
        return build_dataloader(shards.folder, **settings | kwargs)

    return build


def rows(batch) -> list[tuple[int, ...]]:
    """Each sequence with its last label, as in the stream."""
    inputs, labels = batch[0]["input"], batch[1]
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    return [tuple(row) for row in torch.cat([inputs, labels[:, -1:]], dim=1).tolist()]


def served(build, ranks: int, local_batch_size: int, micro_batches: int, **kwargs) -> list[tuple[int, ...]]:
    """Sequences that all ranks together get, in global order."""
    iterators = [
        iter(build(dp_rank=r, dp_world_size=ranks, local_batch_size=local_batch_size, **kwargs)) for r in range(ranks)
    ]
    return [row for _ in range(micro_batches) for iterator in iterators for row in rows(next(iterator))]


@pytest.fixture
def order(build) -> list[tuple[int, ...]]:
    """The first two epochs, one by one."""
    loader = build(local_batch_size=1)
    iterator = iter(loader)
    return [row for _ in range(2 * loader.sequences.length) for row in rows(next(iterator))]


@pytest.mark.parametrize(("ranks", "local_batch_size"), [(1, 12), (2, 3), (3, 2)])
def test_skipped_positions_are_left_out_and_all_else_stays(build, order, ranks, local_batch_size):
    left_out = [*range(1), *range(5, 9), *range(13, 14)]
    expected = [row for position, row in enumerate(order) if position not in left_out]
    skip = ["8", "5-7", "0-0", "13", "6-8"]
    assert served(build, ranks, local_batch_size, 2, skip=skip) == expected[: 2 * ranks * local_batch_size]
    # the position counts without them, so the list may change at a resume
    loader = build(local_batch_size=4, skip=skip)
    iterator = iter(loader)
    assert rows(next(iterator)) == order[1:5] and loader.position == 5
    assert rows(next(iterator)) == order[9:13] and loader.position == 13
    resumed = build(local_batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert rows(next(iter(resumed))) == order[13:17]


@pytest.mark.parametrize("word", ["", "a", "1-", "-1", "3-2", "1-2-3", "1.5"])
def test_what_is_no_position(build, word):
    with pytest.raises(UserError, match="data.skip"):
        build(skip=[word])


@pytest.mark.parametrize(("ranks", "local_batch_size"), [(1, 16), (2, 8), (4, 4), (8, 2), (8, 1), (4, 3)])
def test_order_does_not_depend_on_ranks(ranks, local_batch_size, build, order):
    micro_batches = len(order) // (ranks * local_batch_size)
    assert served(build, ranks, local_batch_size, micro_batches) == order[: micro_batches * ranks * local_batch_size]


def test_epoch_has_every_token_once_in_another_order(shards, order):
    stream = TokenStream(shards, "train")
    length = (len(stream) - 1) // SEQ_LEN
    every = [tuple(stream.read(i * SEQ_LEN, (i + 1) * SEQ_LEN + 1).tolist()) for i in range(length)]
    first, second = order[:length], order[length:]
    assert sorted(first) == sorted(second) == sorted(every)
    assert first != second != every != first
    labels = sorted(label for row in first for label in row[1:])
    assert labels == sorted(stream.read(1, length * SEQ_LEN + 1).tolist())


def test_stream_is_the_shards_end_to_end(shards):
    stream = TokenStream(shards, "train")
    whole = np.concatenate([np.load(shards.folder / shard.tokens_file) for shard in shards.shards["train"]])
    assert len(stream) == len(whole)
    choose = random.Random(0)
    for _ in range(200):
        start, stop = sorted(choose.sample(range(len(whole) + 1), 2))
        np.testing.assert_array_equal(stream.read(start, stop), whole[start:stop])


def resume_trial(build, order, choose: random.Random, num_workers: int) -> None:
    """2 → 4 → 1 ranks, each stopped at a random batch, with another micro-batch each time."""
    got, state = [], None
    for ranks in (2, 4, 1):
        local_batch_size = choose.randint(1, 3)
        loaders = [
            build(
                dp_rank=r,
                dp_world_size=ranks,
                local_batch_size=local_batch_size,
                num_workers=num_workers,
                prefetch_factor=choose.randint(1, 3) if num_workers else None,
            )
            for r in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(choose.randint(1, 8)):
            got += [row for iterator in iterators for row in rows(next(iterator))]
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states) and states[0]["position"] == len(got)
        state = states[0]
    assert got == order[: len(got)]


def test_resume_goes_on_with_the_next_sequence(build, order):
    for trial in range(50):
        resume_trial(build, order, random.Random(trial), num_workers=0)


def test_resume_with_workers_that_have_read_ahead(build, order):
    for trial in range(3):
        resume_trial(build, order, random.Random(trial), num_workers=2)


@pytest.mark.soak
def test_resume_with_workers_fifty_times(build, order):
    for trial in range(50):
        resume_trial(build, order, random.Random(trial), num_workers=1 + trial % 3)


def test_state_survives_a_distributed_checkpoint(build, order, tmp_path):
    loader = build()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    dcp.save({"dataloader": loader}, checkpoint_id=str(tmp_path), no_dist=True)
    other = build(local_batch_size=2)
    dcp.load({"dataloader": other}, checkpoint_id=str(tmp_path), no_dist=True)
    assert other.position == 20
    assert rows(next(iter(other))) == order[20:22]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, "data.seed = 3, this run has 4"),
        ({"seq_len": 12}, "training.seq_len = 24, this run has 12"),
    ],
)
def test_a_position_in_another_order_is_refused(change, message, build):
    state = build().state_dict()
    with pytest.raises(UserError, match=message):
        build(**change).load_state_dict(state)
    build().load_state_dict({})  # a checkpoint without data state


def test_training_stops_and_says_so(build, caplog):
    loader = build(infinite=False, local_batch_size=4)
    length = loader.sequences.length
    with caplog.at_level(logging.WARNING):
        batches = list(loader)
    assert f"all {length:,} sequences" in caplog.text
    assert len(batches) == -(-length // 4)
    assert int((batches[-1][1] != IGNORED_LABEL).sum()) == (length % 4 or 4) * SEQ_LEN
    assert loader.position == length and list(loader) == []


def test_new_epoch_is_said_once(build, caplog):
    loaders = [build(dp_rank=r, dp_world_size=2) for r in range(2)]
    for loader in loaders:
        iterator = iter(loader)
        with caplog.at_level(logging.WARNING):
            for _ in range(loader.sequences.length // 8 + 3):
                next(iterator)
    assert len([r for r in caplog.records if "Epoch 1 of the data is over" in r.message]) == 1


class TestValidation:
    def batches(self, build, **kwargs) -> list:
        return list(build(split="validation", infinite=False, **kwargs))

    @pytest.mark.parametrize("ranks", [1, 2, 4, 8])
    def test_same_sequences_on_any_number_of_ranks(self, ranks, build):
        # 21 sequences divide evenly by none of these; the rest is padded with ignored labels.
        valid, batches = [], set()
        for rank in range(ranks):
            mine = self.batches(build, dp_rank=rank, dp_world_size=ranks, limit_sequences=21)
            batches.add(len(mine))
            for _, labels in mine:
                counted = labels[:, 0] != IGNORED_LABEL
                assert torch.all(labels[~counted] == IGNORED_LABEL)
                valid += [tuple(row) for row in labels[counted].tolist()]
        expected = [row[1:] for row in served(build, 1, 1, 21, split="validation")]
        assert len(batches) == 1, "every rank must get as many batches, or collectives would wait for ever"
        assert sorted(valid) == sorted(expected)

    def test_each_pass_begins_anew_and_ignores_the_seed(self, build):
        loader = build(split="validation", infinite=False, limit_sequences=8)
        first, again = list(loader), list(loader)
        next(iter(loader))  # an interrupted pass
        third, other_seed = list(loader), self.batches(build, limit_sequences=8, seed=99)
        for other in (again, third, other_seed):
            assert [rows(batch) for batch in other] == [rows(batch) for batch in first]

    def test_asking_for_more_than_there_is_uses_all(self, build, caplog):
        with caplog.at_level(logging.WARNING):
            loader = build(split="validation", infinite=False, limit_sequences=10**6)
        assert "all are used instead of the 1000000" in caplog.text
        assert sum(int((labels[:, 0] != IGNORED_LABEL).sum()) for _, labels in loader) == loader.sequences.length


def test_torch_random_numbers_are_left_alone(build):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(iter(build()))
    assert torch.rand(1) == expected

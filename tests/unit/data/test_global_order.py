"""One global order of sequences for any number of ranks, and resume with exactly the next sequence."""

import errno
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pc.errors import UserError
from pc_recipe.data.loader import IGNORED_LABEL, GlobalOrderLoader
from pc_recipe.data.order import shuffled
from pc_recipe.data.token_files import TokenStream
from pc_recipe.files import look
from pc_recipe.files.errors import ReadFailed

SEQ_LEN = 24


@pytest.fixture
def build(shards):
    def build(split="train", **kwargs):
        defaults = dict(seq_len=SEQ_LEN, local_batch_size=4, dp_rank=0, dp_world_size=1, seed=3, vocab_size=32000)
        return GlobalOrderLoader(shards.folder, split, **defaults | kwargs)

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


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
@pytest.mark.fast
def test_a_shuffle_has_every_item_once(n, seed, epoch):
    assert sorted(shuffled(i, n, seed, epoch) for i in range(n)) == list(range(n))


def test_shuffles_mix_well():
    # A random permutation of n leaves each of n - 1 neighbouring pairs adjacent with probability 2/n:
    # about 2 in total, and 12 or more with a probability below 1e-5. The identity has n - 1.
    order = [shuffled(i, 5000, 0, 0) for i in range(5000)]
    assert sum(abs(a - b) == 1 for a, b in zip(order, order[1:], strict=False)) < 12
    # 4000 draws into 20 cells: chi-square with 19 degrees of freedom exceeds 55 with probability 2e-5.
    counts = Counter(shuffled(0, 1000, seed, 0) // 50 for seed in range(4000))
    assert sum((counts[cell] - 200) ** 2 / 200 for cell in range(20)) < 55
    assert len({tuple(shuffled(i, 500, seed, epoch) for i in range(500)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.fast
def test_an_epoch_has_every_token_once_in_another_order(shards, order):
    stream = TokenStream(shards, "train")
    length = (shards.tokens("train") - 1) // SEQ_LEN
    every = [tuple(stream.read(i * SEQ_LEN, (i + 1) * SEQ_LEN + 1).tolist()) for i in range(length)]
    first, second = order[:length], order[length:]
    assert sorted(first) == sorted(second) == sorted(every)
    assert first != second != every != first


@pytest.mark.fast
def test_resume_goes_on_with_the_next_sequence(build, order):
    """On 2, then 4, then 1 ranks, with other micro-batches, stopped at a random batch; data read ahead are not skipped."""
    for trial in range(30):
        choose = random.Random(trial)
        got, state = [], build().state_dict()
        for ranks in (2, 4, 1):
            settings = {"dp_world_size": ranks, "local_batch_size": choose.randint(1, 3)}
            loaders = [build(dp_rank=rank, **settings) for rank in range(ranks)]
            for loader in loaders:
                loader.load_state_dict(state)
            iterators = [iter(loader) for loader in loaders]
            for _ in range(choose.randint(1, 8)):
                got += [row for iterator in iterators for row in rows(next(iterator))]
                assert not any(loader.look_ahead(choose.randint(0, 2)) for loader in loaders)
            states = [loader.state_dict() for loader in loaders]
            assert all(one == states[0] for one in states) and states[0]["position"] == len(got)
            state = states[0]
        assert got == order[: len(got)]


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


@pytest.mark.parametrize(("ranks", "local_batch_size"), [(1, 12), (2, 3), (3, 2)])
def test_skipped_positions_are_left_out_and_all_else_stays(build, order, ranks, local_batch_size):
    left_out = [*range(1), *range(5, 9), *range(13, 14)]
    expected = [row for position, row in enumerate(order) if position not in left_out]
    skip = ["8", "5-7", "0-0", "13", "6-8"]
    assert served(build, ranks, local_batch_size, 2, skip=skip) == expected[: 2 * ranks * local_batch_size]
    # the position counts skipped sequences too, so the list may change at a resume
    loader = build(local_batch_size=4, skip=skip)
    iterator = iter(loader)
    assert rows(next(iterator)) == order[1:5] and rows(next(iterator)) == order[9:13]
    resumed = build(local_batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert rows(next(iter(resumed))) == order[13:17]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_validation_has_the_same_sequences_on_any_number_of_ranks(ranks, build):
    # 21 sequences divide evenly by none of these; the rest is padded with ignored labels.
    valid, batches = [], set()
    for rank in range(ranks):
        mine = list(build("validation", dp_rank=rank, dp_world_size=ranks, limit_sequences=21))
        batches.add(len(mine))
        for _, labels in mine:
            counted = labels[:, 0] != IGNORED_LABEL
            assert torch.all(labels[~counted] == IGNORED_LABEL)
            valid += [tuple(row) for row in labels[counted].tolist()]
    expected = [row[1:] for row in served(build, 1, 1, 21, split="validation")]
    assert len(batches) == 1, "every rank must get as many batches, or collectives would wait for ever"
    assert sorted(valid) == sorted(expected)


def test_each_validation_begins_anew_and_ignores_the_seed(build):
    loader = build("validation", limit_sequences=8)
    first = [rows(batch) for batch in loader]
    next(iter(loader))  # an interrupted pass
    assert [rows(batch) for batch in loader] == first
    assert [rows(batch) for batch in build("validation", limit_sequences=8, seed=99)] == first


def test_data_that_cannot_be_read_ahead_are_an_error_when_they_are_used(build, monkeypatch):
    """So that the batches before them are trained on, and saved."""
    loader = build()
    iterator = iter(loader)
    next(iterator)
    assert loader.look_ahead(1) is None

    def fail(*_, **__):
        raise OSError(errno.EIO, "made by the test")

    monkeypatch.setattr(look, "PAUSES", ())
    monkeypatch.setattr(np, "fromfile", fail)
    error = loader.look_ahead(2)
    assert isinstance(error, ReadFailed) and "tokens.npy: could not be read (made by the test)" in str(error)
    assert len(rows(next(iterator))) == 4 and loader.state_dict()["position"] == 8
    with pytest.raises(ReadFailed):
        next(iterator)
    assert loader.state_dict()["position"] == 8

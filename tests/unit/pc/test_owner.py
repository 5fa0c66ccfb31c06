import weakref
from types import SimpleNamespace

import pytest
import torch

from pc import UserError, owner
from pc.assignment import reused
from pc.owner import Plan

pytestmark = pytest.mark.fast


def test_one_process_runs_alike_items_in_batches(monkeypatch):
    matrices = [torch.full((2, 3), float(i)) for i in range(5)] + [torch.ones(4, 2)]
    keys = [1, 1, 1, 1, 10, 1]
    batches = []

    def double(key, matrix):
        batches.append((key, tuple(matrix.shape)))
        return (2 * key * matrix,)

    originals = [m.clone() for m in matrices]
    items = [(m,) for m in matrices]
    Plan(items, items, keys).run(double, items, items)  # one by one on a CPU
    assert [shape[0] for _, shape in batches] == [1] * 6
    batches.clear()
    monkeypatch.setattr(owner, "ONE_BY_ONE", ())
    monkeypatch.setattr(owner, "BUCKET_BYTES", 3 * matrices[0].nbytes)
    Plan(items, items, keys).run(double, items, items)
    # as many of one key and shape as fit; a larger one goes alone
    assert sorted(batches) == [(1, (1, 2, 3)), (1, (1, 4, 2)), (1, (3, 2, 3)), (10, (1, 2, 3))]
    for matrix, original, key in zip(matrices, originals, keys, strict=True):
        assert torch.equal(matrix, (2 * key) ** 2 * original)


def test_what_does_not_fit_is_refused():
    items, others = [(torch.ones(2, 3),)], [(torch.ones(3, 2),)]
    for inputs, outputs in (
        ([(torch.ones(2, 2), torch.ones(2).double())], [()]),
        (items, [(*items[0], torch.ones(1).double())]),
    ):
        with pytest.raises(UserError, match="one dtype"):
            Plan(inputs, outputs)
    with pytest.raises(UserError, match=r"\[\(1, 3, 2\)\] instead of \[\(1, 2, 3\)\]"):
        Plan(items, items).run(lambda key, x: (x.mT,), items, items)
    with pytest.raises(UserError, match="other shapes"):
        Plan(items, items).run(lambda key, x: (x,), others, others)


def test_a_batch_and_its_results_are_gone_before_the_next(monkeypatch):
    alive = []

    def function(key, *batch):
        assert not any(reference() is not None for reference in alive)
        result = batch[0] + batch[1]
        alive[:] = [weakref.ref(tensor) for tensor in (*batch, result)]
        return (result,)

    items = [(torch.ones(2, 2), torch.ones(2, 2)) for _ in range(4)]
    outputs = [(first,) for first, _ in items]
    monkeypatch.setattr(owner, "ONE_BY_ONE", ())
    monkeypatch.setattr(owner, "BUCKET_BYTES", 2 * 32)
    Plan(items, outputs).run(function, items, outputs)
    assert alive and all(torch.equal(first, torch.full((2, 2), 2.0)) for first, _ in items)


def test_matrices_that_lie_apart_are_not_copied(monkeypatch):
    monkeypatch.setattr(owner, "ONE_BY_ONE", ())
    matrices = [torch.full((2, 3), float(i)) for i in range(3)]
    items = [(m, torch.ones(1)) for m in matrices]
    places = [m.data_ptr() for m in matrices]
    seen = []

    def double(_, given, ones):
        seen.append([one.data_ptr() for one in given])
        assert ones.shape == (3, 1)
        return 2 * torch.cat([*given]), ones

    Plan(items, items, apart=True).run(double, items, items)
    Plan(items, items).run(lambda _, given, ones: double(_, [given], ones), items, items)  # control: one batch
    assert seen[0] == places and len(seen[1]) == 1
    assert all(torch.equal(m, torch.full((2, 3), 4.0 * i)) for i, m in enumerate(matrices))


def test_weights_that_owners_keep_fit_every_one_of_them():
    """A bucket has a list for each owner. The largest owner decides, in the order of the buckets."""

    def bucket(*of_owners):
        return [[SimpleNamespace(bytes=size) for size in sizes] for sizes in of_owners]

    buckets = [bucket([4, 1], [3]), bucket([2], [4]), bucket([1], [1])]
    assert [reused(buckets, room) for room in (4, 5, 6, 7, 9)] == [[1], [0], [0, 2], [0, 1], [0, 1, 2]]

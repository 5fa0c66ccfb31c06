"""The two passes of an optimizer step, on tensors: gradients of PC(W) become those of W and gamma, and PC(W) is written.

Both need full matrices: `pc.owner` gathers each on one rank and sends the results back. This file knows no optimizers, hooks
or versions; `pc.watch` decides when a pass runs. The way of one gradient and one weight, top to bottom:

    watch        pull_back: may there be gradients of PC(W), and of which weights? then, below
    step         pull_back: W, the gradient, gamma, u, v of each weight; results go to what is its gradient
    owner        Plan.run: every shard to its matrix's owner; there, batch by batch
    splits       WeightSplit.pull_back: a stored weight as matrices
    method       Method.pull_back: s, and the product through it
    polynomial   vjp: the product through the map; back up, the results go to the ranks that hold shards
    watch        the optimizer's step has moved W: once all have stepped,
    step         write: W, gamma, u, v of each weight; results go into PC(W), u, v
    owner        Plan.run, of all weights the same plan; its batches have kept squares from the write for the pull back
    splits       WeightSplit.evaluate
    method       Method.evaluate: Gram matrix, power iteration, second start, s
    polynomial   apply_and_keep: the map

Every matrix goes on to `pc.owner`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pc.owner import Plan, RecentPlans
from pc.shards import entries_of, on_any_rank, shards_of, viewed
from pc.splits import WeightSplit
from pc.weight import Tensors, gamma_values, require_precision

# The most that a rank keeps from `write` to `pull_back`; it recomputes the rest. Both need more while they run.
KEPT_BYTES = 256 * 2**20
# The most bytes of W that an owner keeps from `write` to `pull_back`, so that they are sent once; other W is sent twice.
KEPT_W_BYTES = 512 * 2**20
# {place in a pull back's inputs: place in a write's inputs and results}: W, gamma, and the u and v that the write has found
REUSED = {0: 0, 2: 1, 3: 5, 4: 6}
# Of the norm of PC(W), as loaded: four times what tf32 changes (docs/performance.md#precision).
TOLERANCE = 2e-3


class Step:
    """Both passes over the weights of a model. Every rank calls each with the same weights.

    Args:
        splits: by the name of a weight.
        sharing: ranks that have the same plain weights and gradients, and share the work.
        replicas: what `DistributedDataParallel` has wrapped: a rank that has joined, with no more batches, shares nothing,
            nor do any where a hook replaces the averaging of gradients.
    """

    def __init__(
        self,
        splits: Mapping[str, WeightSplit],
        sharing: dist.ProcessGroup | None,
        replicas: Sequence[DistributedDataParallel],
    ) -> None:
        self._splits, self._sharing, self._replicas, self._plans = splits, sharing, replicas, RecentPlans()

    def pull_back(
        self,
        weights: Mapping[str, Tensors],  # those that have a gradient, by name
        gradients: Sequence[Tensor],  # of PC(W), sharded as it is; perhaps views of DDP's buckets, so not written to
    ) -> list[tuple[Tensor, Tensor]]:
        """For each weight the gradient with respect to W, as stored, and to gamma, [P] or [E P]."""
        plan, gammas = self._plan(weights, share=True)
        inputs = [(w.orig, g, gamma, w.u, w.v) for w, g, gamma in zip(weights.values(), gradients, gammas, strict=True)]
        outputs = [(torch.empty_like(g), torch.empty_like(gamma)) for g, gamma in zip(gradients, gammas, strict=True)]
        plan.run(WeightSplit.pull_back, inputs, outputs, other=1)
        return [(of_w, viewed(of_g, (of_g.numel(),)) if of_g.ndim > 1 else of_g) for of_w, of_g in outputs]

    def write(
        self,
        weights: Mapping[str, Tensors],  # all, by name
        advance: bool,  # whether u and v advance first
        share: bool,  # whether all ranks call this now
    ) -> Tensor:
        """Write PC(W), and the u and v that it was computed with. Returns the largest ratio of a second start
        (`pc.method.second_start`), of those that this rank gets, []: above a map's reach u and v were replaced."""
        self._plans.forget()
        plan, gammas = self._plan(weights, share)
        ratios = [torch.empty_like(gamma) for gamma in gammas]
        inputs = [(w.orig, gamma, w.u, w.v) for w, gamma in zip(weights.values(), gammas, strict=True)]
        outputs = [(w.effective, w.u, w.v, ratio) for w, ratio in zip(weights.values(), ratios, strict=True)]
        plan.run(partial(WeightSplit.evaluate, advance=advance), inputs, outputs)
        (shards,) = shards_of([ratios])
        return torch.cat([shards[0].new_zeros(1), *(shard.flatten() for shard in shards)]).max()

    @torch.inference_mode(False)  # as `pc.precondition`; an evaluation may ask
    @torch.no_grad()
    def find_unwritten(
        self,
        weights: Mapping[str, Tensors],  # all, by name
    ) -> list[str]:
        """The names of those whose PC(W) is not what W, gamma, u and v give: computed anew, in a wait for the device. Every
        rank calls it, and gets the same."""
        anew = {
            name: w._replace(effective=nn.Parameter(w.effective.detach().clone(), False), u=w.u.clone(), v=w.v.clone())
            for name, w in weights.items()
        }
        self.write(anew, advance=False, share=False)
        differences = []
        for w, other in zip(weights.values(), anew.values(), strict=True):
            ((found, right),) = shards_of([(w.effective.detach(), other.effective.detach())])
            differences.append((found - right).norm() > TOLERANCE * right.norm())
        found = on_any_rank(torch.stack(differences), [w.orig for w in weights.values()])
        return [name for name, differs in zip(weights, found.tolist(), strict=True) if differs]

    def forget(self) -> None:
        """Drop what was kept of the last write, because W, u or v have changed."""
        self._plans.forget()

    def _plan(self, weights: Mapping[str, Tensors], share: bool) -> tuple[Plan, list[Tensor]]:
        """The plan of these weights, made when it is first needed, and their gammas, [P] or [E, P]."""
        gammas = [gamma_values(self._splits[name], w.effective, w.gamma) for name, w in weights.items()]
        # a rank has left, or the ranks' gradients may differ, as by hooks for local SGD
        is_alone = any(ddp._join_config.enable or ddp._comm_hooks for ddp in self._replicas)
        sharing = self._sharing if share and not is_alone else None
        # `model.double()` makes other weights of the same names
        key = (sharing, *((name, w.orig.dtype, w.orig.device) for name, w in weights.items()))
        return self._plans.get(key, partial(self._make_plan, weights, gammas, sharing)), gammas

    def _make_plan(
        self, weights: Mapping[str, Tensors], gammas: list[Tensor], sharing: dist.ProcessGroup | None
    ) -> Plan:
        """For both passes. One of fewer weights than are written only pulls back, and so keeps nothing."""
        for name, w in weights.items():
            require_precision(name, w.effective)
        pairs = [*zip(weights.values(), gammas, strict=True)]
        # A plan is made for shapes and shards: PC(W) stands for its gradient, W and gamma for theirs, gamma for ratios.
        of_pull_back = [(w.orig, w.effective, gamma, w.u, w.v) for w, gamma in pairs]
        pull_back = of_pull_back, [(w.orig, gamma) for w, gamma in pairs]
        write = (
            [(w.orig, gamma, w.u, w.v) for w, gamma in pairs],
            [(w.effective, w.u, w.v, gamma) for w, gamma in pairs],
        )
        splits = [self._splits[name] for name in weights]
        costs = [split.cost for split in splits]
        return Plan(
            *write,
            splits,
            costs,
            sharing,
            others=[pull_back],
            room=KEPT_BYTES,
            reuse=REUSED,
            reuse_room=KEPT_W_BYTES,
            apart=True,
        )


# --- what tensors tell of a step, as numbers on the device: nothing here waits for it, or asks other ranks


@torch.no_grad()
def checksums(weights: Iterable[Tensors]) -> tuple[Any, Tensor]:
    """Sums of the bits, as integers, of this rank's shard of each W, then of each gamma, of each PC(W), and of all u and v, by
    their place, [3 n + 1] int64: the same on any number of threads. Before them the dtype and device; sums of others are not
    compared, because `model.float()` changes all values."""
    tensors = ((w.orig, w.gamma, w.effective, w.u, w.v) for w in weights)
    of_w, of_gamma, of_pc, *vectors = entries_of(zip(*tensors, strict=True))
    found = []
    for shard in (*of_w, *of_gamma, *of_pc):
        if shard is None:  # not learnable
            found.append(torch.zeros((), dtype=torch.int64, device=of_w[0].device))
            continue
        flat = shard.detach().reshape(-1)
        # two float32 at a time, if possible, are ten times as fast, but two changed signs in odd columns cancel; of whole
        # float64 any two would
        in_pairs = flat.itemsize == 4 and flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0
        word = torch.int64 if in_pairs else torch.int32 if flat.itemsize % 4 == 0 else torch.int16
        found.append(flat.view(word).sum())
    # by two bytes, because in half precision their number may be odd
    words = torch.cat([one.flatten() for of_all in vectors for one in of_all]).view(torch.int16)
    found.append((words * (2 * torch.arange(len(words), device=words.device) + 1)).sum())
    return (of_w[0].dtype, of_w[0].device), torch.stack(found)


def should_move(weights: Iterable[Tensors], rates: Mapping[int, Any]) -> Tensor:
    """Whether a step should move each W on this rank, [n]: the update, of the size of the gradient (as by SGD) or 1 (as by
    Adam) times the rate, does not vanish beside the largest entry.

    Args:
        rates: by the id of a parameter; without one, the step leaves it alone.
    """
    found = []
    for w in weights:
        should = torch.zeros((), dtype=torch.bool, device=w.orig.device)
        rate, gradient = rates.get(id(w.orig)), w.orig.grad
        if rate is not None and gradient is not None:
            ((shard, gradient),) = shards_of([(w.orig.detach(), gradient)])
            if shard.numel():
                size, largest = (torch.linalg.vector_norm(one, torch.inf) for one in (gradient, shard))
                should = size.isfinite() & (size.clamp(max=1.0) * rate > torch.finfo(shard.dtype).eps * largest)
        found.append(should)
    return torch.stack(found)


class Stuck:
    """Finds a W that has not moved in `LIMIT` writes before which it should have, and in no other."""

    # Half of `pc.watch.LOOKS`: some optimizers leave out their first step, as SOAP, or add up the gradients of several.
    LIMIT = 16

    def __init__(self) -> None:
        self.should: list[Tensor] = []
        """by each step since the last write: whether it should have moved each W, [n]"""
        self._times: Any = 0
        """in how many writes each W should have moved and had not, -1 once it has, [n]"""
        self._found = Arrival()

    def look(
        self,
        before: Tensor,  # checksums at the last write
        now: Tensor,  # and at this one
    ) -> int | None:  # the index of a W
        if not self.should:
            return None
        should, self.should = torch.stack(self.should).any(0), []
        has_moved = (before != now)[: len(should)]  # W, not gamma
        self._times = torch.where(has_moved | (self._times < 0), -1, self._times + should)
        return self._found.find(self._times >= self.LIMIT)


class Arrival:
    """Tells the host which condition on the device was true: in the same call on a CPU, else in a later one."""

    def __init__(self) -> None:
        self._largest: Tensor | None = None
        self._copy: tuple[Tensor, Any] | None = None

    def find(
        self,
        conditions: Tensor,  # [k] bool
    ) -> int | None:  # the index of one that is true, now or in an earlier call
        number = torch.where(conditions.any(), conditions.to(torch.int8).argmax() + 1, 0)
        self._largest = number if self._largest is None else torch.maximum(self._largest, number)
        if self._copy is None:
            copy = self._largest.to("cpu", non_blocking=True)  # pinned, from a GPU
            event = None if self._largest.device.type == "cpu" else torch.Event(self._largest.device)
            if event is not None:
                event.record()
            self._copy = copy, event
        copy, event = self._copy
        if event is not None and not event.query():
            return None
        self._copy = None
        if not copy:
            return None
        self._largest = None  # it is found once
        return int(copy) - 1

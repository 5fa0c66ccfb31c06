"""A step whose gradient is not finite on one rank changes neither weights nor optimizer state on any rank."""

import json
import math

import torch

from helpers import tiny
from helpers.ranks import run_ranks
from helpers.toy import whole

BAD_STEPS = (3, 4)


def _train(rank, config):
    """The state after each step of a run, in which gradients of rank 1 become infinite."""
    trainer = tiny.make_trainer(config, [])
    finish_gradients, seen = trainer._finish_gradients, [_state(trainer)]

    def finish():
        finish_gradients()
        if trainer.step in BAD_STEPS and rank == 1:
            trainer.model_parts[0].layers["0"].attention.wo.weight_orig.grad._local_tensor[-1, -1] = math.inf

    trainer._finish_gradients = finish
    save = trainer.checkpointer.save
    trainer.checkpointer.save = lambda *args, **kwargs: (seen.append(_state(trainer)), save(*args, **kwargs))
    trainer.train()
    trainer.close()
    return seen


def _state(trainer):
    """This rank's weights, W, and whole optimizer state."""
    tensors = {f"optimizer.{k}": whole(v) for k, v in trainer.optimizers.state_dict().items() if torch.is_tensor(v)}
    return tensors | tiny.state_of(trainer)


def test_a_bad_step_is_left_out(tiny_config):
    config, folder = tiny_config
    for states in run_ranks(2, _train, config):
        assert len(states) == 7
        moved = [
            any(not torch.equal(a[k], b[k]) for k in b if k in a) for a, b in zip(states, states[1:], strict=False)
        ]
        assert moved == [True, True, False, False, True, True]
        assert all(tensor.isfinite().all() for tensor in states[-1].values())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps_left_out"]) for line in lines if "steps_left_out" in line] == [(3, 1), (4, 2)]
    # no checkpoint of a step that is left out, although the interval is 3
    assert {p.name for p in (folder / "checkpoint").iterdir()} == {"step-6"}

"""A step whose loss or gradient is not finite changes neither weights nor optimizer state on any rank."""

import json
import math

import pytest
import torch

from helpers import tiny
from helpers.ranks import run_ranks
from helpers.toy import whole
from pc_recipe.train.nonfinite import Diverged


def _train(rank, config, overrides, bad_steps, value, stop_at=None):
    """The state after each step and the error of a run. In `bad_steps` a gradient of rank 1 becomes `value`, or, with "loss",
    its loss NaN; in step `stop_at` rank 1 is asked to stop."""
    trainer = tiny.make_trainer(config, overrides)
    run_micro_batches, finish_gradients, seen = trainer._run_micro_batches, trainer._finish_gradients, [_state(trainer)]

    def is_bad():
        return trainer.step in bad_steps and rank == 1

    def finish():
        finish_gradients()
        trainer._stop_requested |= trainer.step == stop_at and rank == 1
        if is_bad() and value != "loss":
            trainer.model_parts[0].layers["0"].attention.wo.weight_orig.grad._local_tensor[-1, -1] = value

    trainer._run_micro_batches = lambda data: (
        run_micro_batches(data) * (math.nan if is_bad() and value == "loss" else 1)
    )
    trainer._finish_gradients = finish
    save, error = trainer.checkpointer.save, ""
    trainer.checkpointer.save = lambda *args, **kwargs: (seen.append(_state(trainer)), save(*args, **kwargs))
    try:
        trainer.train()
    except Diverged as raised:
        error = str(raised)
    trainer.close()
    return seen, error


def _state(trainer):
    """This rank's weights, W, and whole optimizer state."""
    tensors = {f"optimizer.{k}": whole(v) for k, v in trainer.optimizers.state_dict().items() if torch.is_tensor(v)}
    return tensors | tiny.state_of(trainer)


MUON = ["--optimizer.name", "Muon"]
FUSED = ["--optimizer.implementation", "fused"]


@pytest.mark.parametrize(
    "overrides, value",
    [([], math.inf), ([*MUON, *FUSED], "loss"), ([*MUON, *FUSED], 1e30)],
    ids=["foreach-inf", "muon-loss", "muon-overflow"],
)
def test_a_bad_step_is_left_out(tiny_config, overrides, value):
    config, folder = tiny_config
    for states, error in run_ranks(2, _train, config, overrides, (3, 4), value):
        assert error == "" and len(states) == 7
        moved = [
            any(not torch.equal(a[k], b[k]) for k in b if k in a) for a, b in zip(states, states[1:], strict=False)
        ]
        assert moved == [True, True, False, False, True, True]
        assert all(tensor.isfinite().all() for tensor in states[-1].values())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["steps_left_out"]) for line in lines if "steps_left_out" in line] == [(3, 1), (4, 2)]
    # no checkpoint of a step that is left out, although the interval is 3
    assert {p.name for p in (folder / "checkpoint").iterdir()} == {"step-6"}


def test_too_many_bad_steps_in_a_row_stop_the_run(tiny_config):
    config, folder = tiny_config
    words = ["--training.steps", "20", "--lr_scheduler.total_steps", "20"]
    for states, error in run_ranks(2, _train, config, [*FUSED, *words], range(4, 20), math.nan):
        assert "not finite in 3 steps in a row, up to step 6; data positions 36-71" in error
        assert (
            "not finite now: gradient of layers.0.attention.wo.weight_orig. None" in error
            and "data.skip" in error
            and "\n" not in error
        )
    assert {p.name for p in (folder / "checkpoint").iterdir()} == {"step-3"}  # no checkpoint of the last step


def test_a_run_that_is_asked_to_stop_in_a_bad_step_stops_after_the_next_good_one(tiny_config):
    """A bad step is never saved: the cause may be in W itself, and before the first update optimizers have no state."""
    config, folder = tiny_config
    run_ranks(2, _train, config, [], (1, 2), math.nan, 1)
    assert {p.name for p in (folder / "checkpoint").iterdir()} == {"step-3"}
    for states, error in run_ranks(2, _train, config, [], (), math.nan):  # continues
        assert error == "" and len(states) == 4

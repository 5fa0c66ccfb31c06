"""The line that reports the outcome of a run."""

from helpers.made_runs import write_run
from pc_recipe.runs.outcome import describe_outcome


def test_speed_is_of_the_steps_that_were_timed(tmp_path):
    """Here every tenth step is logged, and a validation follows the last step."""
    lines = [
        {"step": step, "tokens": 10 * step, "loss": 3.0 - step / 100, "step_seconds": 2.0, "validation_loss": 3.0}
        for step in (1, 10, 20)
    ]
    assert "validation" not in describe_outcome(write_run(tmp_path / "other", [*lines, {"step": 25, "tokens": 250}]))
    run = write_run(tmp_path / "run", [*lines, {"step": 29, "tokens": 290, "validation_loss": 2.5}])
    assert describe_outcome(run).startswith(
        "Finished at step 29: train loss 2.8000 (step 20), validation loss 2.5000, 290 tokens, 5 tokens/s (first 20 steps, 0:00:40)."
    )
    timed = write_run(tmp_path / "timed", lines)
    assert describe_outcome(timed).startswith(
        "Finished at step 20: train loss 2.8000, validation loss 3.0000, 200 tokens in 0:00:40 of training steps, 5 tokens/s."
    )


def test_a_run_that_logged_nothing_has_finished_all_the_same(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 3, "tokens": 30}])
    (run / "metrics.jsonl").unlink()
    assert describe_outcome(run).startswith("Finished at step 3.\n")

"""What experiments/initialisation trains next follows from the losses so far by the rules of its plan."""

from experiments.initialisation.train import LR, Losses, Run, plan, scaled
from pc_recipe.files.run_folder import write_state


def run_all(loss) -> tuple[list[str], Losses]:
    """Train everything the plan asks for: the names of the arms in the order of their first runs, and all losses."""
    order: list[str] = []
    losses: Losses = {}
    while groups := plan(losses):
        group = groups[0]
        assert group.is_whole, "the most urgent group can always be trained"
        for run in group.runs:
            assert run.key not in losses
            losses[run.key] = loss(run)
            order += [] if run.arm in order else [run.arm]
    return order, losses


def bowl(run: Run, init: float, rate_factor: float, rate: float) -> float:
    """Lowest at these factors and this rate; the second seed is always 0.01 higher."""
    settings = run.settings
    found = [settings.get("model.init_factors", {"o": 1})["o"], settings.get("optimizer.lr_factors", {"o": 1})["o"]]
    wanted = [init, rate_factor]
    away = sum(abs(one - other) for one, other in zip(found, wanted, strict=True))
    return away + 10 * abs(settings[LR] - rate) + (run.seed == 2) * 0.01


def test_the_grid_is_left_where_the_best_is_its_corner_and_rates_until_they_are_enclosed():
    order, losses = run_all(lambda run: bowl(run, 3.4, 1.3, 2.263e-2))
    tuned = [arm for arm in order if arm.startswith("scale-") and "level" not in arm]
    assert len(tuned) == 9 + 5  # two round 2.4, 1.3, then three round 3.4, 1.3
    chosen = {key[0]: key[2] for key in losses if key[1] == "scale-level-4"}
    assert chosen == {"20": 2.263e-2}
    assert {key[2] for key in losses if key[1] == scaled((4, 1))[0]} == {8e-3, 1.131e-2, 1.6e-2, 2.263e-2, 3.2e-2}


def test_order_and_number_of_runs_with_the_best_in_the_middle():
    order, losses = run_all(lambda run: bowl(run, 1.7, 2.1, 1.131e-2))
    tests = ["baseline", "level-4", "scale", "scale-level-4", "retraction", "muon", "MuonH-level-2", "warmup-10"]
    assert [arm for arm in order if arm in tests] == tests
    tuning = [key for key in losses if key[0] == "tuning" and key[1].startswith("scale")]
    assert len(tuning) == 9 + 4 + 4 + 6  # seed 1; seed 2 of four; two more rates; three rates with PC
    assert {key[3] for key in losses if key[0] != "tuning"} == set(range(31, 39))


def test_a_run_has_ended_once_its_sweep_has_the_result(tmp_path, monkeypatch):
    """Collecting between the run's last state and the sweep's result ended the queue, and its other runs with it."""
    monkeypatch.setattr("experiments.initialisation.train.SWEEPS", tmp_path)
    run = plan({})[0].runs[0]
    write_state(tmp_path / run.name / run.arm / f"seed-{run.seed}", "finished", 6, 6)
    assert not run.has_ended
    (tmp_path / run.name / "results.jsonl").write_text('{"state": "finished"}\n')
    assert run.has_ended


def test_a_group_waits_for_its_last_arm():
    groups = [group for group in plan({}) if group.runs[0].study == "20"]
    assert [run.arm for run in groups[0].runs] == ["baseline", "level-4"] and not groups[0].is_whole

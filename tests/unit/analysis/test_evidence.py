"""Tables of evidence: the chosen rate, the seeds used, differences and errors."""

import json

import pytest

from pc.analysis import evidence
from pc.errors import UserError

# {(pc on, learning rate): final losses of seeds 0, 1, 2}; None: diverged
LOSSES = {
    (False, 1e-3): [4.0],
    (False, 2e-3): [3.9, 4.2, 4.4],
    (True, 1e-3): [3.7, 3.8, 4.0],
    (True, 2e-3): [3.8, 3.9, 4.0],
}


def _sweep(folder, losses, config="c.toml", stops_at=None):
    """A finished sweep's folder with synthetic runs, validated at steps 1, 3 and 5; `stops_at`: {name: last step}."""
    results = []
    for (on, rate), finals in losses.items():
        for seed, final in enumerate(finals):
            name = f"{on}-{rate}/seed-{seed}"
            (folder / name).mkdir(parents=True)
            lines = [
                {"step": 1, "tokens": 10, "validation_loss": 5.0, "loss": 5.0},
                {"step": 3, "tokens": 30, "validation_loss": (final or 9.0) + 0.5},
                {"step": 5, "tokens": 50, "spectra/gmcn/pc": 7.0, "spectra/estimate_error/o/max": 0.01},
                {"step": 5, "tokens": 50, "validation_loss": final, "signal/ffn/rms/0": 2.0, "signal/ffn/rms/1": 3.0},
            ]
            kept = [line for line in lines if line["step"] <= (stops_at or {}).get(name, 5)]
            (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
            toml = f"[optimizer]\nlr = {rate}\n[debug]\nseed = {seed}\n"
            (folder / name / "config.toml").write_text(toml)
            (folder / name / "environment.json").write_text("{}")
            state = "diverged" if final is None else "finished"
            settings = {"optimizer.lr": rate, "pc.enable": on}
            results.append({"name": name, "config": config, "settings": settings, "spikes": 0, "state": state})
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    return folder


def _arms(tmp_path, losses=LOSSES, **options):
    evidence.collect([_sweep(tmp_path / "sweep", losses, **options)], "study", tmp_path / "kept")
    return evidence.read_studies(tmp_path / "kept")["study"]


def test_rate_by_the_first_seed_and_judged_on_the_others(tmp_path):
    """PC's best rate by seed 0 is 1e-3; only seeds 1 and 2 enter the figures, paired with the baseline's."""
    arms = _arms(tmp_path)
    table = evidence.arm_table(arms)
    assert "| pc off | 0.002 | 4.3000 ± 0.1000 (n = 2) |" in table
    # 3.8 - 4.2 and 4.0 - 4.4 are equal; unpaired errors would be 0.14
    assert "| pc on | 0.001 | 3.9000 ± 0.1000 (n = 2) | 0.002 | -0.4000 ± 0.0000 (n = 2) |" in table
    assert "| pc on | 0.002 | 3.9500 ± 0.0500 (n = 2) | 0.002 | -0.3500 ± 0.0500 (n = 2) |" in table
    assert len(table.splitlines()) == 5  # the baseline's other rate has no seed but the choosing one
    assert "| 0.001 | 4.0000 | **3.7000**; 3.9000 ± 0.1000 (n = 2) |" in evidence.grid_table(arms)
    assert "better for pc off; pc on." in evidence.untuned(arms)
    assert "| difference after tokens | learning rates | n | 30 | 50 |" in evidence.course_table(arms)
    assert "| pc on | 0.001 / 0.002 | 2 | -0.400 | -0.400 |" in evidence.course_table(arms)
    conditioning = evidence.conditioning_table(arms)
    assert "| pc on | 0.001 | 1, 2 | 7.0 | - | - | 1.0e-02 / 1.0e-02 | - / 3 |" in conditioning
    assert "| pc on | 0.002 | 0 | 7.0 |" in conditioning  # at equal rates


def test_a_rate_inside_the_grid_is_tuned(tmp_path):
    arms = _arms(tmp_path, LOSSES | {(True, 5e-4): [3.9]})
    assert "better for pc off.\n" in evidence.untuned(arms)
    assert "| 0.0005 | not run | 3.9000 |" in evidence.grid_table(arms)


def test_one_rate_for_all_was_not_chosen(tmp_path):
    arms = _arms(tmp_path, {(False, 1e-3): [4.0], (True, 1e-3): [3.7]})
    assert "| -0.3000 (n = 1) |" in evidence.arm_table(arms)
    assert evidence.untuned(arms) == evidence.grid_table(arms) == ""


def test_without_other_seeds_the_choosing_one_is_named(tmp_path):
    arms = _arms(tmp_path, {pair: finals[:1] for pair, finals in LOSSES.items()})
    assert "| -0.2000 (n = 1), on the choosing seed |" in evidence.arm_table(arms)


def test_other_rates_of_the_reference(tmp_path):
    """PC at its best against every rate of the baseline that has other seeds, so that no figure is made by hand."""
    table = evidence.arm_table(_arms(tmp_path, LOSSES | {(False, 1e-3): [4.0, 4.2, 4.4]}))
    assert "| pc on | 0.001 | 3.9000 ± 0.1000 (n = 2) | 0.001 | -0.4000 ± 0.0000 (n = 2) |" in table


def test_diverged_runs_are_shown_counted_and_never_the_best(tmp_path):
    """Seed 1 stopped early, so its course ends in "diverged"; no NaN in the file, which JSON does not know."""
    losses = LOSSES | {(True, 2e-3): [None, None, 4.0]}
    arms = _arms(tmp_path, losses, stops_at={"True-0.002/seed-1": 3})
    assert "NaN" not in (tmp_path / "kept" / "runs.jsonl").read_text()
    assert arms[1].best_rate == 1e-3
    assert "| inf (diverged); inf (n = 2, 1 diverged) |" in evidence.grid_table(arms)
    line = "| pc on | 0.002 | inf (n = 2, 1 diverged) | 0.002 | inf (n = 2, 1 diverged) | - |"
    assert line in evidence.arm_table(arms)
    assert "| pc on | 0.002 / 0.002 | 2 | diverged | diverged |" in evidence.course_table(arms)


def test_the_course_of_an_arm_with_a_seed_that_stopped_early(tmp_path):
    """The mean of the seeds that were validated, with their number."""
    arms = _arms(tmp_path, stops_at={"True-0.001/seed-2": 3})
    assert "| pc on | 0.001 / 0.002 | 2 | -0.400 | -0.400 (1) |" in evidence.course_table(arms)


def test_one_validation_has_no_course(tmp_path):
    assert (
        evidence.course_table(
            _arms(tmp_path, stops_at={f"{on}-{rate}/seed-{seed}": 1 for on, rate in LOSSES for seed in range(3)})
        )
        == ""
    )


def test_studies_in_one_file(tmp_path):
    """Collecting a study again replaces it; sweeps of two configs are different arms; the report has all studies."""
    one = _sweep(tmp_path / "one", LOSSES)
    other = _sweep(tmp_path / "other", LOSSES, config="small/muon.toml")
    kept = tmp_path / "kept"
    for _ in range(2):
        assert evidence.collect([one, other], "both", kept) == 2 * sum(map(len, LOSSES.values()))
    evidence.collect([one], "alone", kept)
    studies = evidence.read_studies(kept)
    assert [arm.name for arm in studies["both"]] == ["c, pc off", "c, pc on", "muon, pc off", "muon, pc on"]
    assert [path.name for path in evidence.report(kept)] == ["tables.md", "both.png", "alone.png"]
    assert all(path.stat().st_size > 300 for path in evidence.report(kept))


def test_the_same_run_in_two_sweeps(tmp_path):
    """Equal results count once; different ones are refused, because one would hide the other."""
    sweeps = [_sweep(tmp_path / name, LOSSES) for name in ("one", "other")]
    evidence.collect(sweeps, "study", tmp_path / "kept")
    assert (
        sum(len(runs) for arm in evidence.read_studies(tmp_path / "kept")["study"] for runs in arm.runs.values()) == 10
    )
    file = sweeps[1] / "True-0.002" / "seed-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace("3.9", "3.5"))
    evidence.collect(sweeps, "study", tmp_path / "kept")
    with pytest.raises(UserError, match="two runs of pc on with the same learning rate and seed"):
        evidence.read_studies(tmp_path / "kept")


def test_runs_that_were_never_validated_are_no_evidence(tmp_path):
    sweep = _sweep(tmp_path / "sweep", LOSSES)
    for file in sweep.rglob("metrics.jsonl"):
        file.write_text('{"step": 1, "tokens": 10, "loss": 5.0}\n')
    with pytest.raises(UserError, match="no finished run with a validation_loss"):
        evidence.collect([sweep], "study", tmp_path / "kept")

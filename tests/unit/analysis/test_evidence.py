"""Tables of evidence: the chosen rate, the seeds used, differences and errors."""

import json
import math

import pandas as pd
import pytest

from pc.analysis import evidence, evidence_report
from pc.errors import UserError

# {(pc on, learning rate): final losses of seeds 0, 1, 2}; None: diverged
LOSSES = {
    (False, 1e-3): [4.0],
    (False, 2e-3): [3.9, 4.2, 4.4],
    (True, 1e-3): [3.7, 3.8, 4.0],
    (True, 2e-3): [3.8, 3.9, 4.0],
}


CONFIG = """
model = {{ flavor = "{flavor}", vocab_size = 512 }}
training = {{ steps = 100, seq_len = {seq_len}, global_batch_size = 8 }}
lr_scheduler = {{ warmup_steps = 10, min_lr_factor = 0.1 }}
optimizer = {{ name = "AdamW", lr = {rate}, weight_decay = 0.1 }}
pc = {{ enable = {on} }}
debug = {{ seed = {seed} }}
"""


def _sweep(folder, losses, config="c.toml", stops_at=None, flavor="nano", seq_len=16):
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
            toml = CONFIG.format(on=str(on).lower(), rate=rate, seed=seed, flavor=flavor, seq_len=seq_len)
            (folder / name / "config.toml").write_text(toml)
            (folder / name / "environment.json").write_text("{}")
            state = "diverged" if final is None else "finished"
            settings = {"optimizer.lr": rate, "pc.enable": on}
            results.append({"name": name, "config": config, "settings": settings, "spikes": 0, "state": state})
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    return folder


def _arms(tmp_path, losses=LOSSES, **options):
    evidence.collect([_sweep(tmp_path / "sweep", losses, **options)], "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    return experiment.arms


def _pair_table(arms):
    return evidence_report.pair_table(arms, margin=0.01)


def test_rate_by_the_first_seed_and_judged_on_the_others(tmp_path):
    """PC's best rate by seed 0 is 1e-3; only seeds 1 and 2 enter the figures, paired with the baseline's."""
    arms = _arms(tmp_path)
    table = _pair_table(arms)
    assert (
        "| that of pc off | seeds | difference | interval | verdict | times fewer tokens | after 30 | after 50 |"
        in table
    )
    # 3.8 - 4.2 and 4.0 - 4.4 are equal; unpaired errors would be 0.14
    assert "| pc on | 0.001 | 0.002 | 1, 2 | -0.4000 ± 0.0000 |" in table and "| -0.400 | -0.400 |" in table
    assert "| pc on | 0.002 | 0.002 | 1, 2 | -0.3500 ± 0.0500 |" in table
    assert len(table.splitlines()) == 4  # the baseline's other rate has no seed but the choosing one
    health = "7.0 | - | - | 1.0e-02 / 1.0e-02 | - / 3 |"
    assert f"| pc on | **0.001** | 0 | 3.7000 | {health}" in evidence_report.arm_table(arms)
    assert f"| pc on | **0.001** | 1, 2 | 3.9000 ± 0.1000 | {health}" in evidence_report.arm_table(arms)
    assert "| pc off | 0.001 | 0 | 4.0000 |" in evidence_report.arm_table(arms)
    assert "better for pc off; pc on." in evidence_report.untuned(arms)


def test_a_rate_inside_the_grid_is_tuned(tmp_path):
    assert "better for pc off.\n" in evidence_report.untuned(_arms(tmp_path, LOSSES | {(True, 5e-4): [3.9]}))


def test_one_rate_for_all_was_not_chosen(tmp_path):
    assert "| 0 | -0.3000 | - | no test |" in _pair_table(_arms(tmp_path, {(False, 1e-3): [4.0], (True, 1e-3): [3.7]}))


def test_without_other_seeds_the_choosing_one_is_named(tmp_path):
    arms = _arms(tmp_path, {pair: finals[:1] for pair, finals in LOSSES.items()})
    assert "| 0 (chose a rate) | -0.2000 | - | no test |" in _pair_table(arms)


def test_other_rates_of_the_reference(tmp_path):
    """PC at its best against every rate of the baseline that has other seeds, so that no figure is made by hand."""
    table = _pair_table(_arms(tmp_path, LOSSES | {(False, 1e-3): [4.0, 4.2, 4.4]}))
    assert "| pc on | 0.001 | 0.001 | 1, 2 | -0.4000 ± 0.0000 |" in table


def test_diverged_runs_are_shown_counted_and_never_the_best(tmp_path):
    """No NaN in the file, which JSON does not know."""
    losses = LOSSES | {(True, 2e-3): [None, None, 4.0]}
    arms = _arms(tmp_path, losses, stops_at={"True-0.002/seed-1": 3})
    assert "NaN" not in (tmp_path / "kept" / "runs.jsonl").read_text()
    assert arms[1].best_rate == 1e-3
    assert "| pc on | 0.002 | 1, 2 | 1 of 2 diverged |" in evidence_report.arm_table(arms)
    table = _pair_table(arms)
    assert "| pc on | 0.002 | 0.002 | 1, 2 | 1 of 2 diverged | - | no test | - |" in table


def test_the_course_of_an_arm_with_a_seed_that_stopped_early(tmp_path):
    """The mean of the seeds that were validated, with their number."""
    table = _pair_table(_arms(tmp_path, stops_at={"True-0.001/seed-2": 3}))
    assert next(line for line in table.splitlines() if "pc on | 0.001" in line).endswith("| -0.400 | -0.400 (1) |")


def test_a_seeds_sweep_of_both_arms_joins_the_grids_of_each(tmp_path):
    """Sweeps name what they vary; with PC on or off in the config or in the sweep, it is the same arm."""
    grid = _sweep(tmp_path / "grid", {pair: finals[:1] for pair, finals in LOSSES.items() if not pair[0]})
    results = grid / "results.jsonl"
    results.write_text(results.read_text().replace(', "pc.enable": false', ""))
    evidence.collect([grid, _sweep(tmp_path / "both", LOSSES)], "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    assert [arm.name for arm in experiment.arms] == ["pc off", "pc on"]
    assert experiment.arms[0].losses.loc[2e-3].tolist() == [3.9, 4.2, 4.4]


def test_studies_in_one_file(tmp_path):
    """Collecting a study again replaces it; sweeps of two configs are different arms; the report has all studies."""
    one = _sweep(tmp_path / "one", LOSSES)
    other = _sweep(tmp_path / "other", LOSSES, config="small/muon.toml")
    kept = tmp_path / "kept"
    for _ in range(2):
        assert evidence.collect([one, other], "both", kept) == 2 * sum(map(len, LOSSES.values()))
    evidence.collect([one], "alone", kept)
    both, _ = evidence.read_experiments(kept)
    assert [arm.name for arm in both.arms] == ["c, pc off", "c, pc on", "muon, pc off", "muon, pc on"]
    assert [path.name for path in evidence_report.report(kept, margin=0.01)] == ["tables.md", "both.png", "alone.png"]
    assert all(path.stat().st_size > 300 for path in evidence_report.report(kept, margin=0.01))


def test_the_same_run_in_two_sweeps(tmp_path):
    """Equal results count once; different ones are refused, because one would hide the other."""
    sweeps = [_sweep(tmp_path / name, LOSSES) for name in ("one", "other")]
    evidence.collect(sweeps, "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    assert sum(len(arm.logs) for arm in experiment.arms) == sum(map(len, LOSSES.values()))
    file = sweeps[1] / "True-0.002" / "seed-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace("3.9", "3.5"))
    evidence.collect(sweeps, "study", tmp_path / "kept")
    with pytest.raises(UserError, match="second run of pc on with the same learning rate and seed"):
        evidence.read_experiments(tmp_path / "kept")


def test_runs_that_were_never_validated_are_no_evidence(tmp_path):
    sweep = _sweep(tmp_path / "sweep", LOSSES)
    for file in sweep.rglob("metrics.jsonl"):
        file.write_text('{"step": 1, "tokens": 10, "loss": 5.0}\n')
    with pytest.raises(UserError, match="no finished run with a validation_loss"):
        evidence.collect([sweep], "study", tmp_path / "kept")


@pytest.mark.parametrize(
    "differences, expected",
    [
        # by hand: standard error 0.1 / sqrt(3), t = 4.303 for two degrees of freedom
        ([-0.1, -0.2, -0.3], ("-0.4484 to +0.0484", "undecided")),
        ([-0.19, -0.2, -0.21], ("-0.2248 to -0.1752", "better")),
        ([0.19, 0.2, 0.21], ("+0.1752 to +0.2248", "worse")),
        ([-0.001, 0.0, 0.001], ("-0.0025 to +0.0025", "no difference")),
        ([-0.2], ("-", "no test")),
        ([math.inf, -0.2], ("-", "no test")),
    ],
)
def test_verdicts_by_students_interval(differences, expected):
    assert evidence_report.interval_and_verdict(pd.Series(differences), margin=0.01) == expected


def test_the_regime_of_an_experiment(tmp_path):
    evidence.collect([_sweep(tmp_path / "sweep", LOSSES)], "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    # embedding and head; q, k, v, o and the three FFN matrices of five layers; norms
    assert experiment.parameters == 2 * 512 * 128 + 5 * (4 * 128**2 + 3 * 128 * 384) + 11 * 128
    assert experiment.tokens_per_parameter == 100 * 16 * 8 / experiment.parameters
    assert experiment.std_times_root_width == pytest.approx(0.02 * 128**0.5)
    rates = [min(1, (step + 1) / 10) for step in range(10)]
    rates += [0.1 + 0.9 * (1 + math.cos(math.pi * step / 90)) / 2 for step in range(90)]
    # the sum of a rule: half a step's difference at both ends of 100 steps
    assert experiment.rate_times_decay == pytest.approx(2e-3 * 0.1 * sum(rates), rel=0.03)
    assert "| 7.0 to 7.0 |" in evidence_report.regime_table([experiment])


def test_a_ladder_of_sizes(tmp_path):
    """A difference that grows by 0.02 when parameters double, and best rates that fall with their square root."""
    sweeps = []
    for flavor in ("nano", "debug", "60M"):
        size = evidence.parameters(flavor, 512)
        best = float(f"{0.1 / size**0.5:.6g}")
        difference = 0.02 * math.log2(size) - 0.5
        losses = {(False, rate): [loss] for rate, loss in ((best / 2, 4.1), (best, 4.0), (best * 2, 4.2))}
        losses |= {(False, best): [4.0, 4.0, 4.0], (True, best): [4.0 + difference] * 3}
        sweeps.append(_sweep(tmp_path / flavor, losses, flavor=flavor, seq_len=size // 1000))
    evidence.collect(sweeps, "ladder", tmp_path / "kept")
    experiments = evidence.read_experiments(tmp_path / "kept")
    assert [one.name for one in experiments] == [f"ladder: {f}, AdamW, 100 steps" for f in ("nano", "debug", "60M")]
    table = evidence_report.size_table(experiments)
    assert "| AdamW | 0.8 | pc on | 3 | +0.0200 to +0.0200 |" in table
    assert "best rates carried up: 1.953e-05 (N / 26,223,104)^-0.50." in table
    evidence_report.report(tmp_path / "kept", margin=0.01)
    assert table in (tmp_path / "kept" / "tables.md").read_text()

"""Tables of evidence: the chosen rate, the seeds used, differences and errors."""

import json
import shutil

import pytest

from pc.analysis import evidence
from pc.errors import UserError

# {(pc on, learning rate): final losses of seeds 0, 1, 2}
LOSSES = {
    (False, 1e-3): [4.0],
    (False, 2e-3): [3.9, 4.2, 4.4],
    (True, 1e-3): [3.7, 3.8, 4.0],
    (True, 2e-3): [3.8, 3.9, 4.0],
}


@pytest.fixture
def sweep(tmp_path):
    """A finished sweep's folder with synthetic runs."""
    results = []
    for (on, rate), finals in LOSSES.items():
        for seed, final in enumerate(finals):
            name = f"{on}-{rate}/seed-{seed}"
            folder = tmp_path / "sweep" / name
            folder.mkdir(parents=True)
            lines = [
                {"step": 1, "tokens": 10, "validation_loss": 5.0, "loss": 5.0},
                {"step": 2, "tokens": 20, "loss": 4.5},
                {"step": 3, "tokens": 30, "validation_loss": final},
                {
                    "step": 3,
                    "tokens": 30,
                    "spectra/gmcn/pc": 7.0,
                    "spectra/estimate_error/o/max": 0.01,
                    "norm/weight": 1.0,
                    "signal/ffn/rms/0": 2.0,
                    "signal/ffn/rms/1": 3.0,
                },
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "config.toml").write_text("")
            (folder / "environment.json").write_text("{}")
            settings = {"optimizer.lr": rate, "pc.enable": on}
            results.append(
                {"name": name, "config": "c.toml", "settings": settings, "seed": seed, "spikes": 0,
                 "validation_loss": final, "folder": str(folder)}
            )  # fmt: skip
    (tmp_path / "sweep" / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    return tmp_path / "sweep"


def test_rate_by_the_first_seed_and_judged_on_the_others(sweep, tmp_path):
    """PC's best rate by seed 0 is 1e-3; only seeds 1 and 2 enter the figures, paired with the baseline's."""
    kept = tmp_path / "kept"
    assert evidence.collect(sweep, kept) == sum(len(finals) for finals in LOSSES.values())
    assert "norm/weight" not in (kept / "True-0.001" / "seed-0" / "metrics.jsonl").read_text()
    arms = evidence.read_arms([kept])
    assert [arm.name for arm in arms] == ["pc off", "pc on"]
    assert [arm.best_rate for arm in arms] == [2e-3, 1e-3]
    table = evidence.arm_table(arms)
    assert "| pc off | 0.002 | 4.3000 ± 0.1000 (n = 2) |" in table
    # 3.8 - 4.2 and 4.0 - 4.4 are equal; unpaired errors would be 0.14
    assert "| pc on | 0.001 | 3.9000 ± 0.1000 (n = 2) | 0.002 | -0.4000 ± 0.0000 (n = 2) |" in table
    assert "| pc on | 0.002 | 3.9500 ± 0.0500 (n = 2) | 0.002 | -0.3500 ± 0.0500 (n = 2) |" in table
    assert len(table.splitlines()) == 5  # the baseline's other rate has no seed but the choosing one
    assert "| 0.001 | 4.0000 | **3.7000**; 3.9000 ± 0.1000 (n = 2) |" in evidence.grid_table(arms)
    assert "| difference after tokens | learning rates | n | 30 |" in evidence.course_table(arms)
    assert "| pc on | 0.001 / 0.002 | 2 | -0.400 |" in evidence.course_table(arms)
    conditioning = evidence.conditioning_table(arms)
    assert "| pc on | 0.001 | 1, 2 | 7.0 | - | - | 1.0e-02 / 1.0e-02 | - / 3 |" in conditioning
    assert "| pc on | 0.002 | 0 | 7.0 |" in conditioning  # at equal rates
    for path in evidence.report([kept], tmp_path / "report"):
        assert path.stat().st_size > 300


def test_the_seed_that_chose_the_rate_is_left_out(sweep):
    """Seed 0 ran at one rate alone, so seed 1 chooses."""
    arm = evidence.read_arms([sweep])[1]
    del arm.runs[1e-3][0]
    assert (arm.first_seed, arm.best_rate) == (1, 1e-3)
    assert list(arm.judged(1e-3)) == [2] and list(arm.judged(2e-3)) == [0, 2]
    arm.runs[1e-3] = {seed: arm.runs[1e-3][2] for seed in (2, 10)}
    arm.runs[2e-3] = dict(arm.runs[1e-3])
    assert list(arm.judged(1e-3)) == [10]


def test_a_best_rate_at_the_edge_is_called_untuned(sweep):
    arms = evidence.read_arms([sweep])
    assert "better for pc off; pc on." in evidence.untuned(arms)
    for rate in (5e-4, 4e-3):
        arms[1].runs[rate] = {0: arms[0].runs[1e-3][0]}
    assert "better for pc off." in evidence.untuned(arms)
    assert "| 0.0005 | not run | 4.0000 |" in evidence.grid_table(arms)
    for arm in arms:
        arm.runs = {2e-3: arm.runs[2e-3]}
    assert evidence.untuned(arms) == ""  # one rate for all, as configured


def test_other_rates_of_the_reference(sweep):
    """PC at its best against every rate of the baseline that has other seeds, so that no figure is made by hand."""
    arms = evidence.read_arms([sweep])
    arms[0].runs[1e-3] |= {seed: arms[0].runs[2e-3][seed] for seed in (1, 2)}
    assert "| pc on | 0.001 | 3.9000 ± 0.1000 (n = 2) | 0.001 | -0.4000 ± 0.0000 (n = 2) |" in evidence.arm_table(arms)


def test_differences_without_other_seeds(sweep):
    arms = evidence.read_arms([sweep])
    assert evidence.mean_and_error([4.0]) == "4.0000 (n = 1)"
    arms[0].runs = {1e-3: arms[0].runs[1e-3]}
    assert "| -0.3000 (n = 1), on the choosing seed |" in evidence.arm_table(arms)
    arms[1].runs = {1e-3: {0: arms[1].runs[1e-3][0]}}
    assert "| -0.3000 (n = 1) |" in evidence.arm_table(arms)  # one rate, so nothing was chosen
    arms[1].runs = {1e-3: {1: arms[1].runs[1e-3][0]}}
    assert "| no common seed |" in evidence.arm_table(arms)
    assert evidence.course_table(arms) == ""


def test_a_run_that_diverged_is_never_the_best(sweep):
    arm = evidence.read_arms([sweep])[0]
    run = arm.runs[2e-3][0]
    run.lines[-2]["validation_loss"] = None
    assert arm.best_rate == 1e-3


def _change(sweep, copy, **values):
    """A copy of a sweep's folder with other values in every line of its results."""
    shutil.copytree(sweep, copy)
    lines = [json.loads(line) | values for line in (copy / "results.jsonl").read_text().splitlines()]
    (copy / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def test_sweeps_of_different_configs_are_different_arms(sweep, tmp_path):
    other = _change(sweep, tmp_path / "other", config="small/muon.toml")
    names = [arm.name for arm in evidence.read_arms([sweep, other])]
    assert names == ["c, pc off", "c, pc on", "muon, pc off", "muon, pc on"]
    other = _change(sweep, tmp_path / "same_name", config="small/c.toml")
    assert [arm.name for arm in evidence.read_arms([sweep, other])][1:3] == ["c, pc on", "small/c, pc off"]


def test_the_same_run_in_two_sweeps(sweep, tmp_path):
    """Equal results count once; different ones are refused, because one would hide the other."""
    other = _change(sweep, tmp_path / "other")
    arms = evidence.read_arms([sweep, other])
    assert sum(len(runs) for arm in arms for runs in arm.runs.values()) == sum(map(len, LOSSES.values()))
    file = other / "True-0.002" / "seed-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace("3.9", "3.5"))
    with pytest.raises(UserError, match="sweep/True-0.002/seed-1 and .*other/True-0.002/seed-1: two runs of pc on"):
        evidence.read_arms([sweep, other])


def _diverge(sweep, *names):
    """The runs end with a validation loss of NaN, which both files hold as null."""
    lines = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if line["name"] in names:
            line["validation_loss"] = None
            file = sweep / line["name"] / "metrics.jsonl"
            file.write_text(
                file.read_text().replace(
                    f'"validation_loss": {LOSSES[True, 2e-3][line["seed"]]}', '"validation_loss": null'
                )
            )
    (sweep / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_diverged_runs_are_shown_and_counted(sweep, tmp_path):
    _diverge(sweep, "True-0.002/seed-0", "True-0.002/seed-1")
    assert evidence.collect(sweep, tmp_path / "kept") == sum(map(len, LOSSES.values()))
    arms = evidence.read_arms([tmp_path / "kept"])
    assert "| inf (diverged); inf (n = 2, 1 diverged) |" in evidence.grid_table(arms)
    # both arms at the reference's rate: the difference and the speedup of a run that diverged are unknown
    line = "| pc on | 0.002 | inf (n = 2, 1 diverged) | 0.002 | inf (n = 2, 1 diverged) | - |"
    assert line in evidence.arm_table(arms)
    assert "| diverged |" in evidence.course_table(arms)
    evidence.report([tmp_path / "kept"], tmp_path / "report")
    assert "diverged: it counts as infinite" in (tmp_path / "report" / "tables.md").read_text()


def test_a_run_that_stopped_because_it_diverged_is_counted(sweep, tmp_path):
    """It has no final validation; those from before it diverged do not count."""
    lines = [json.loads(line) for line in (sweep / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if line["name"] in ("True-0.002/seed-0", "True-0.002/seed-1"):
            line |= {"validation_loss": None, "state": "diverged"}
    (sweep / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence.collect(sweep, tmp_path / "kept")
    for folder in (sweep, tmp_path / "kept"):
        arms = evidence.read_arms([folder])
        assert arms[1].best_rate == 1e-3
        assert "| inf (diverged); inf (n = 2, 1 diverged) |" in evidence.grid_table(arms)


def test_a_diverged_rate_was_run(sweep):
    """PC's best of three rates has a diverged one above it, so the grid reaches far enough."""
    lines = (sweep / "results.jsonl").read_text()
    below = [json.loads(line) for line in lines.splitlines() if "True-0.001" in line]
    below = [
        line | {"settings": {"optimizer.lr": 5e-4, "pc.enable": True}, "name": "True-0.0005"} for line in below[:1]
    ]
    shutil.copytree(sweep / "True-0.002" / "seed-0", sweep / "True-0.0005")
    (sweep / "results.jsonl").write_text(lines + json.dumps(below[0]) + "\n")
    _diverge(sweep, "True-0.002/seed-0", "True-0.002/seed-1", "True-0.002/seed-2")
    arms = evidence.read_arms([sweep])
    assert arms[1].best_rate == 1e-3
    assert "better for pc off." in evidence.untuned(arms)


def test_runs_that_were_never_validated_are_no_evidence(sweep):
    for file in sweep.rglob("metrics.jsonl"):
        file.write_text('{"step": 1, "tokens": 10, "loss": 5.0}\n')
    with pytest.raises(UserError, match="no finished run with a validation_loss"):
        evidence.read_arms([sweep])


def test_a_copied_sweep_is_collected_from_the_copy(sweep, tmp_path):
    """Its results still name the folders of the original; these count only where the copy has no runs."""
    copy = _change(sweep, tmp_path / "copy")
    file = copy / "True-0.002" / "seed-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace("3.9", "3.5"))
    shutil.rmtree(copy / "False-0.001")
    evidence.collect(copy, tmp_path / "kept")
    assert "3.5" in (tmp_path / "kept" / "True-0.002" / "seed-1" / "metrics.jsonl").read_text()
    assert (tmp_path / "kept" / "False-0.001" / "seed-0" / "metrics.jsonl").is_file()


def test_one_validation_has_no_course(sweep, tmp_path):
    for file in sweep.rglob("metrics.jsonl"):
        file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"step": 1,' not in line))
    assert evidence.course_table(evidence.read_arms([sweep])) == ""
    evidence.report([sweep], tmp_path / "report")


def test_the_configs_own_rate_is_a_rate_like_the_others(sweep, tmp_path):
    """A sweep without the axis, such as the main runs, beside a grid of the same config."""
    other = _change(sweep, tmp_path / "other", settings={"pc.enable": True})
    lines = [line for line in (other / "results.jsonl").read_text().splitlines() if "True-0.002" in line]
    (other / "results.jsonl").write_text("\n".join(lines))
    for file in other.rglob("config.toml"):
        file.write_text("[optimizer]\nlr = 2e-3\n")
    assert list(evidence.read_arms([sweep, other])[1].runs) == [1e-3, 2e-3]
    evidence.report([sweep, other], tmp_path / "report")

"""Tables of evidence: the chosen rate, the seeds used, differences and errors."""

import json
import math
import shutil

import pandas as pd
import pytest
from scipy import stats

from experiments import evidence
from experiments.contrasts import Preregistration, Question, compare_means, contrast_table, interval_and_verdict
from experiments.tables import arm_table, pair_table, regime_table, report, untuned
from helpers.made_runs import write_run
from pc.errors import UserError
from pc_recipe.config.model_sizes import FLAVORS
from pc_recipe.files.run_folder import write_state
from pc_recipe.runs.sweep.points import read_results

# {(pc on, learning rate): final losses of seeds 0, 1, 2}; None: diverged
LOSSES = {
    (False, 1e-3): [4.0],
    (False, 2e-3): [3.9, 4.2, 4.4],
    (True, 1e-3): [3.7, 3.8, 4.0],
    (True, 2e-3): [3.8, 3.9, 4.0],
}
COUNT = sum(map(len, LOSSES.values()))

CONFIG = """
job = {{ dump_folder = "{folder}" }}
model = {{ flavor = "{flavor}", vocab_size = 512 }}
training = {{ steps = 100, seq_len = 16, global_batch_size = 8 }}
lr_scheduler = {{ warmup_steps = 10, min_lr_factor = 0.1 }}
optimizer = {{ name = "AdamW", lr = {rate}, weight_decay = 10.0 }}
pc = {{ enable = {on} }}
debug = {{ seed = {seed} }}
"""


def _sweep(folder, losses, config="c.toml", stops_at=None, flavor="nano", tokens=10):
    """A finished sweep's folder with runs of `tokens` per step, validated at 20, 60 and 100; `stops_at`: {name: last step}."""
    results = []
    for (on, rate), finals in losses.items():
        for seed, final in enumerate(finals):
            name = f"{on}-{rate}/seed-{seed}"
            lines = [
                {"step": 20, "validation_loss": 5.0, "loss": 5.0},
                {"step": 60, "validation_loss": (final or 9.0) + 0.5},
                {"step": 100, "spectra/gmcn/pc": 7.0},
                {"step": 100, "validation_loss": final},
            ]
            kept = [line for line in lines if line["step"] <= (stops_at or {}).get(name, 100)] or [
                {"step": 1, "loss": 9.0}
            ]
            state = "diverged" if final is None else "finished"
            write_run(folder / name, [line | {"tokens": tokens * line["step"]} for line in kept], state)
            toml = CONFIG.format(on=str(on).lower(), rate=rate, seed=seed, flavor=flavor, folder=folder / name)
            (folder / name / "config.toml").write_text(toml)
            (folder / name / "environment.json").write_text("{}")
            settings = {"optimizer.lr": rate, "pc.enable": on}
            results.append({"name": name, "config": config, "settings": settings, "spikes": 0, "state": state})
    (folder / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    return folder


def _experiment(tmp_path, losses=LOSSES, **options):
    evidence.collect([_sweep(tmp_path / "sweep", losses, **options)], "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    return experiment


def test_rate_by_the_first_seed_and_judged_on_the_others(tmp_path):
    """Seed 0 chooses 1e-3 for PC; only seeds 1 and 2 enter the figures, paired with the baseline's."""
    table = pair_table(_experiment(tmp_path), Preregistration())
    header, _, best, at_the_references = table.splitlines()  # the baseline's other rate has only the choosing seed
    assert header.endswith("| seeds | difference | interval | verdict | times fewer tokens | after 600 | after 1 k |")
    # both differences are -0.4; an unpaired error would be 0.14
    assert best.startswith(
        "| pc on | 0.001 | 0.002 | 1, 2 | -0.4000 ± 0.0000 | -0.4000 to -0.4000 | lower |"
    ) and best.endswith("| -0.400 | -0.400 |")
    assert at_the_references.startswith("| pc on | 0.002 | 0.002 | 1, 2 | -0.3500 ± 0.0500 |")
    runs = _experiment(tmp_path / "again").runs
    table = arm_table(runs)
    assert "| pc on | **0.001** | 0 | 3.7000 | 7.0 | - | - |" in table
    assert "| pc on | **0.001** | 1, 2 | 3.9000 ± 0.1000 | 7.0 | - | - |" in table
    assert "| pc off | 0.001 | 0 | 4.0000 |" in table
    assert "better for pc off; pc on." in untuned(runs)


def test_diverged_runs_are_shown_counted_and_never_the_best(tmp_path):
    """The file has no NaN, which is not JSON."""
    losses = LOSSES | {(True, 2e-3): [None, None, 4.0]}
    experiment = _experiment(tmp_path, losses, stops_at={"True-0.002/seed-1": 0})
    assert "NaN" not in (tmp_path / "kept" / "runs.jsonl").read_text()
    arms = arm_table(experiment.runs)
    assert "| pc on | **0.001** |" in arms and "| pc on | 0.002 | 1, 2 | 1 of 2 diverged |" in arms
    table = pair_table(experiment, Preregistration())
    assert "| pc on | 0.002 | 0.002 | 1, 2 | 1 of 2 diverged | - | no test | - |" in table


# Differences of paired seeds: mean -0.008, standard error 0.002828 / sqrt(6); the interval is 2.5706 of these to each side.
DIFFERENCES = (-0.010, -0.006, -0.012, -0.004, -0.008, -0.008)


@pytest.mark.parametrize(
    "differences, expected",
    [
        (DIFFERENCES, ("-0.0110 to -0.0050", "lower")),
        ([one + 0.016 for one in DIFFERENCES], ("+0.0050 to +0.0110", "higher")),
        ([one + 0.007 for one in DIFFERENCES], ("-0.0040 to +0.0020", "no difference")),
        # narrow enough, but not inside the margin
        ([one + 0.0105 for one in DIFFERENCES], ("-0.0005 to +0.0055", "undecided")),
        # by hand: standard error 0.1 / sqrt(3), t = 4.303 for two degrees of freedom
        ([-0.1, -0.2, -0.3], ("-0.4484 to +0.0484", "undecided")),
        ([-0.2], ("-", "no test")),
        ([math.inf, -0.2], ("-", "no test")),
    ],
)
def test_the_verdict_of_paired_seeds(differences, expected):
    losses = pd.Series(differences) + 4.0
    assert interval_and_verdict(compare_means(losses, losses * 0 + 4.0, paired=True), margin=0.005) == expected


def test_the_mean_of_the_planned_tuning_seeds_chooses_the_rate(tmp_path):
    """Seed 0 alone would choose 1e-3. A seed of one arm whose partner in the other has not run yet does not count."""
    losses = {(False, 1e-3): [3.9, 4.5], (False, 2e-3): [4.0, 4.1, 4.0, 4.1], (True, 2e-3): [3.9, 4.0, 3.8, 4.0, 9.0]}
    evidence.collect([_sweep(tmp_path / "sweep", losses)], "study", tmp_path / "kept")
    (tmp_path / "kept" / "plan.toml").write_text("tuning_seeds = [0, 1]\nmargin = 0.01")
    tables, _ = report(tmp_path / "kept")
    text = tables.read_text()
    assert "| pc off | **0.002** | 0, 1 |" in text and "no difference* if the interval lies inside ±0.01;" in text
    assert "| pc on | 0.002 | 0.002 | 2, 3 | -0.1500 ± 0.0500 |" in text


# {arm: losses of seeds 0, 1, ...} at one rate
TESTED = {
    "plain": [4.0, 4.1, 4.2, 4.3, 4.4],
    "full": [3.9, 4.0, 4.11, 4.21, 4.3],
    "part": [4.0, 4.2, 4.19, 4.31, 4.2],
}


def _contrasts(losses, paired=True) -> dict[str, list[str]]:
    """{contrast: its cells from the number of seeds on}. Holm corrects for three rows, of which one has an absent arm."""
    runs = [
        {"arm": arm, "seed": seed, "loss": loss, "best": True, "chose": False}
        for arm, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    question = Question(holm=True, contrasts=[["full", "plain"], ["part", "plain"], ["absent", "plain"]])
    table = contrast_table(pd.DataFrame(runs), Preregistration(questions=[question], paired=paired))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {row[1]: row[2:] for row in rows}


def test_a_diverged_run_keeps_its_row_and_its_place_in_the_correction():
    """Also if both runs of a seed diverged, whose difference is NaN."""
    whole = _contrasts(TESTED)
    p = stats.ttest_rel(TESTED["part"], TESTED["plain"]).pvalue
    assert whole["part - plain"][3] == f"{p:.2g}" and "absent - plain" not in whole
    full = stats.ttest_rel(TESTED["full"], TESTED["plain"]).pvalue
    assert whole["full - plain"][4] == f"{3 * full:.2g}"  # three rows are planned
    diverged = _contrasts(TESTED | {"part": [4.0, math.inf, 4.2, 4.3, 4.2]})
    assert diverged["part - plain"] == ["5", "1 of 5 diverged", "-", "-", "-", "no test"]
    assert diverged["full - plain"] == whole["full - plain"]
    both = {arm: [math.inf, *losses[1:]] for arm, losses in TESTED.items()}
    assert _contrasts(both)["full - plain"][:2] == ["5", "1 of 5 diverged"]


def test_groups_of_other_seeds_are_compared_by_welch():
    full, plain = TESTED["full"], [*TESTED["plain"], 4.5, 4.4]
    row = _contrasts(TESTED | {"plain": plain}, paired=False)["full - plain"]
    test = stats.ttest_ind(full, plain, equal_var=False)
    low, high = test.confidence_interval()
    assert row[:4] == [f"{len(full)}, {len(plain)}", f"{sum(full) / len(full) - sum(plain) / len(plain):+.4f}"] + [
        f"{low:+.4f} to {high:+.4f}", f"{test.pvalue:.2g}"
    ]  # fmt: skip
    diverged = _contrasts(TESTED | {"plain": [math.inf, *plain]}, paired=False)["full - plain"]
    assert diverged[:2] == [f"5, {len(plain) + 1}", f"1 of {len(plain) + 1} diverged"]


def test_only_planned_seeds_are_tested(tmp_path):
    """Other seeds that ran at the best rate, for a curve of the loss against the rate, are shown separately."""
    losses = {(False, 2e-3): TESTED["plain"], (True, 2e-3): TESTED["full"]}
    evidence.collect([_sweep(tmp_path / "sweep", losses)], "study", tmp_path / "kept")
    plan = 'tuning_seeds = [0]\ntest_seeds = [2, 3, 4]\nquestions = [{ contrasts = [["pc on", "pc off"]] }]'
    (tmp_path / "kept" / "plan.toml").write_text(plan)
    tables, _ = report(tmp_path / "kept")
    text = tables.read_text()
    assert "| pc on - pc off | 3 | -0.0933 |" in text and "| pc on | 0.002 | 0.002 | 2, 3, 4 | -0.0933" in text
    assert "| pc on | **0.002** | 0, 1 | 3.9500" in text


def test_a_seed_that_chose_a_rate_is_not_tested(tmp_path):
    """Even if the plan names it for the test, and does not name it for tuning."""
    evidence.collect([_sweep(tmp_path / "sweep", LOSSES)], "study", tmp_path / "kept")
    (tmp_path / "kept" / "plan.toml").write_text("test_seeds = [0, 1, 2]")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    assert experiment.runs.seed[experiment.runs.chose].unique().tolist() == [0]


def test_models_with_other_vocabularies_are_two_experiments(tmp_path):
    for name, size in (("one", 512), ("two", 513)):
        for config in _sweep(tmp_path / name, LOSSES).rglob("config.toml"):
            config.write_text(config.read_text().replace("vocab_size = 512", f"vocab_size = {size}"))
    evidence.collect([tmp_path / "one", tmp_path / "two"], "study", tmp_path / "kept")
    one, other = evidence.read_experiments(tmp_path / "kept")
    assert one.name == "study: nano, AdamW, 100 steps" and other.name == f"{one.name} (513 entries, 64 sequences of 16)"


def test_a_run_that_two_sweeps_list_is_of_one_arm(tmp_path):
    """The second sweep varies the level, which the first leaves at its default, and has a link to the first's run."""
    rates = _sweep(tmp_path / "rates", LOSSES)
    levels = _sweep(tmp_path / "levels", {(True, 1e-3): [3.6], (True, 2e-3): [9.0]})
    lines = [json.loads(line) for line in (levels / "results.jsonl").read_text().splitlines()]
    lines[0]["settings"]["pc.level"], lines[1]["settings"]["pc.level"] = 1, 4
    config = levels / lines[0]["name"] / "config.toml"
    config.write_text(config.read_text().replace("enable = true", "enable = true, level = 1"))
    shutil.rmtree(levels / lines[1]["name"])
    (levels / lines[1]["name"]).symlink_to(rates / lines[1]["name"])
    (levels / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence.collect([rates, levels], "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    counts = experiment.runs.groupby("arm", sort=False).size().to_dict()
    assert counts == {"pc off": 4, "pc on": 6, "pc on, level 1": 1}


def test_runs_of_one_arm_with_other_settings_are_refused(tmp_path):
    """A variant's name says nothing of them, and the folder's does not either."""
    for name, decay in (("one", 1.5171), ("moved", 1.5171), ("other", 1.5174)):
        folder = _sweep(tmp_path / name, {(False, 1e-3): [3.8], (True, 1e-3): [3.6]})
        lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        variants = [line | {"variant": ["baseline", "pc"][line["settings"]["pc.enable"]]} for line in lines]
        (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in variants))
        for config in folder.glob("True*/*/config.toml"):
            text = config.read_text().replace("weight_decay = 10.0", f"weight_decay = {decay}")
            config.write_text(f'data = {{ path = "{name}" }}{text}')
            data = {"content of data.path": "abc"}  # on two machines
            (config.parent / "environment.json").write_text(json.dumps({"data": data}))
    evidence.collect([tmp_path / "one", tmp_path / "moved"], "study", tmp_path / "kept")
    evidence.read_experiments(tmp_path / "kept")
    evidence.collect([tmp_path / "other"], "study", tmp_path / "kept")
    with pytest.raises(
        UserError,
        match="pc at one learning rate differ: optimizer.weight_decay is 1.5171 and 1.5174; collect them as two",
    ):
        evidence.read_experiments(tmp_path / "kept")


def test_a_run_whose_log_lost_its_end_is_refused(tmp_path):
    """Its last validation is not its final loss."""
    sweep = _sweep(tmp_path / "sweep", {(True, 1e-3): [3.6]})
    file = sweep / "True-0.001" / "seed-0" / "metrics.jsonl"
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if "3.6" not in line))
    config = file.with_name("config.toml")
    for steps in (100, 10_000):  # the default
        with pytest.raises(UserError, match=f"True-0.001/seed-0 was last validated after step 60 of {steps}; "):
            evidence.collect([sweep], "study", tmp_path / "kept")
        config.write_text(config.read_text().replace("steps = 100, ", ""))


def test_results_that_are_older_than_a_run_are_refused(tmp_path):
    """Array tasks end without writing the sweep's results."""
    sweep = _sweep(tmp_path / "sweep", {(False, 2e-3): [3.9, None]})
    write_state(sweep / "False-0.002" / "seed-1", "finished", 5, 5)  # it was repeated
    with pytest.raises(UserError, match="results.jsonl is older than False-0.002/seed-1, which has finished"):
        evidence.collect([sweep], "study", tmp_path / "kept")
    (sweep / "results.jsonl").write_text("a = 1\n")
    with pytest.raises(UserError, match="results.jsonl: damaged, or of another form"):
        read_results(sweep)


def test_rates_whose_tuning_seeds_have_not_all_run_are_still_reported(tmp_path):
    _sweep(tmp_path / "sweep", {(True, 1e-3): [3.7], (True, 2e-3): [3.8, 3.9]})
    lines = (tmp_path / "sweep" / "results.jsonl").read_text().splitlines(keepends=True)
    del lines[1]  # one rate has seed 0 so far, the other seed 1
    shutil.rmtree(tmp_path / "sweep" / "True-0.002" / "seed-0")
    (tmp_path / "sweep" / "results.jsonl").write_text("".join(lines))
    evidence.collect([tmp_path / "sweep"], "study", tmp_path / "kept")
    (tmp_path / "kept" / "plan.toml").write_text("tuning_seeds = [0, 1]")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    assert experiment.runs.rate[experiment.runs.best].unique().tolist() == [1e-3]


def test_studies_in_one_file(tmp_path):
    """Collecting runs again replaces them; sweeps of two configs are different arms; the report has all studies."""
    one = _sweep(tmp_path / "one", LOSSES)
    other = _sweep(tmp_path / "other", LOSSES, config="small/muon.toml")
    kept = tmp_path / "kept"
    for _ in range(2):
        assert evidence.collect([one, other], "both", kept) == 2 * COUNT
    evidence.collect([one], "alone", kept)
    both, _ = evidence.read_experiments(kept)
    assert both.runs.arm.unique().tolist() == ["c, pc off", "c, pc on", "muon, pc off", "muon, pc on"]
    written = report(kept)
    assert [path.name for path in written] == ["tables.md", "both.png", "alone.png"]
    assert all(path.stat().st_size > 300 for path in written)


def test_the_same_run_in_two_sweeps(tmp_path):
    """Equal results count once; different ones are refused, because one would hide the other."""
    sweeps = [_sweep(tmp_path / name, LOSSES) for name in ("one", "other")]
    evidence.collect(sweeps, "study", tmp_path / "kept")
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    assert len(experiment.runs) == COUNT
    file = sweeps[1] / "True-0.002" / "seed-1" / "metrics.jsonl"
    file.write_text(file.read_text().replace("3.9", "3.5"))
    evidence.collect(sweeps, "study", tmp_path / "kept")
    with pytest.raises(UserError, match="second run of pc on with the same learning rate and seed"):
        evidence.read_experiments(tmp_path / "kept")


def test_runs_that_another_experiment_shares(tmp_path):
    """A plan takes baselines from another folder: of the same steps, before its own runs, which may repeat some of them."""
    baselines = {(False, rate): losses for (on, rate), losses in LOSSES.items() if not on}
    evidence.collect([_sweep(tmp_path / "old", baselines)], "old", tmp_path / "shared")
    longer = _sweep(tmp_path / "longer", baselines)
    for config in longer.glob("*/*/config.toml"):
        config.write_text(config.read_text().replace("steps = 100", "steps = 400"))
    for log in longer.glob("*/*/metrics.jsonl"):
        log.write_text(log.read_text().replace('"step": 100', '"step": 400'))
    evidence.collect([longer], "longer", tmp_path / "shared")
    own = {**{pair: losses for pair, losses in LOSSES.items() if pair[0]}, (False, 1e-3): [4.0]}
    sweep = _sweep(tmp_path / "new", own)
    with (sweep / "False-0.001" / "seed-0" / "metrics.jsonl").open("a") as file:
        for step, length in ((60, 0.4), (100, 0.2)):
            sizes = {"norm/effective": 0.1 * step, "norm/relative_step": length}
            file.write(json.dumps({"step": step, "tokens": 10 * step} | sizes) + "\n")
    evidence.collect([sweep], "new", tmp_path / "kept")
    (alone,) = evidence.read_experiments(tmp_path / "kept")
    assert alone.runs.arm[0] == "pc on"
    (tmp_path / "kept" / "plan.toml").write_text('shared_runs = ["../shared/runs.jsonl"]')
    (experiment,) = evidence.read_experiments(tmp_path / "kept")
    assert experiment.name == "new" and experiment.runs.arm[0] == "pc off"
    assert len(experiment.runs) == COUNT
    header, _, repeated, *others = arm_table(experiment.runs).splitlines()
    assert header.endswith("| their norm | mean relative step |")
    assert repeated.endswith("| 10 | 0.3 |")  # from its own log: the final norm, and the mean relative step
    assert all(line.endswith("| - | - |") for line in others)


def test_the_regime_of_an_experiment(tmp_path):
    experiment = _experiment(tmp_path)
    # embedding and head; q, k, v, o and the three FFN matrices of five layers; norms
    assert experiment.parameters == 2 * 512 * 128 + 5 * (4 * 128**2 + 3 * 128 * 384) + 11 * 128
    assert experiment.tokens_per_parameter == pytest.approx(100 * 10 / experiment.parameters)
    *_, warm_up, _, std, condition, _ = regime_table([experiment]).split("|")
    assert (warm_up, condition) == (" 10.0% ", " 7.0 to 7.0 ")
    assert float(std) == pytest.approx(0.02 * 128**0.5, abs=0.005)


WARM_UP = [(step + 1) / 10 for step in range(10)]


@pytest.mark.parametrize(
    "schedule, rates",
    [
        ({}, WARM_UP + [0.1 + 0.9 * (1 - step / 90) for step in range(90)]),
        (
            {"decay_type": "sqrt", "decay_ratio": 0.2},
            WARM_UP + [1.0] * 71 + [0.1 + 0.9 * (1 - (step / 20) ** 0.5) for step in range(1, 20)],
        ),
        ({"total_steps": 50}, WARM_UP + [0.1 + 0.9 * (1 - min(step, 39) / 40) for step in range(90)]),
    ],
    ids=["linear", "a plateau", "shorter than the run"],
)
def test_rates_and_decay_are_summed_over_the_schedule(tmp_path, schedule, rates):
    experiment = _experiment(tmp_path)
    for key, value in schedule.items():
        setattr(experiment.config.lr_scheduler, key, value)
    *_, rate_times_decay, _, _, _ = regime_table([experiment]).split("|")
    assert float(rate_times_decay) == pytest.approx(2e-3 * 10 * sum(rates), abs=0.005)


def test_a_ladder_of_sizes(tmp_path):
    """The difference grows by 0.02 when parameters double, and the best rate falls with their square root."""
    sweeps = []
    for flavor in ("nano", "debug", "60M"):
        size = evidence.parameters(FLAVORS[flavor], 512)
        best = float(f"{0.1 / size**0.5:.6g}")
        difference = 0.02 * math.log2(size) - 0.5
        losses = {(False, best / 2): [4.1], (False, best): [4.0] * 3, (False, best * 2): [4.2]}
        losses |= {(True, best): [4.0 + difference] * 3}
        sweeps.append(_sweep(tmp_path / flavor, losses, flavor=flavor, tokens=size / 125))
    evidence.collect(sweeps, "ladder", tmp_path / "kept")
    experiments = evidence.read_experiments(tmp_path / "kept")
    assert [one.name for one in experiments] == [f"ladder: {f}, AdamW, 100 steps" for f in ("nano", "debug", "60M")]
    report(tmp_path / "kept")
    text = (tmp_path / "kept" / "tables.md").read_text()
    assert "| AdamW | 0.8 | pc on | 3 | +0.0200 to +0.0200 |" in text
    assert "best rate at N parameters: 1.953e-05 (N / 26,223,104)^-0.50\n" in text

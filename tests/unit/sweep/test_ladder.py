"""A ladder of tiny models, from its sweep's file to the verdict."""

from pathlib import Path

from helpers import tiny
from helpers.ranks import run_ranks
from pc.analysis import evidence, evidence_report
from pc.settings import load_config, models
from pc.sweep import equal_runs, spec
from pc.sweep.results import collect
from pc.titan.environment import write_environment

SWEEP = """
configs = ["tiny.toml"]
folder = "sweep"
seeds = [1, 2]
axes = { "pc.enable" = [false, true] }
[variants.narrow]
"model.flavor" = "narrow"
"training.steps" = 4
"checkpoint.enable" = false
[variants.middle]
"model.flavor" = "tiny"
"training.steps" = 6
"checkpoint.enable" = false
[variants.wide]
"model.flavor" = "wide"
"training.steps" = 9
"checkpoint.enable" = false
"""


def _add_flavors() -> None:
    tiny.add_tiny_flavor()
    models.FLAVORS["narrow"] = models.Flavor(dim=16, n_layers=2, n_heads=2, multiple_of=8)
    models.FLAVORS["wide"] = models.Flavor(dim=32, n_layers=2, n_heads=2, multiple_of=8)


def _train_all(rank: int, runs: list[spec.Run]) -> None:
    _add_flavors()
    for run in runs:
        tiny.train(rank, Path(run.config), list(run.overrides))
        write_environment(run.folder, load_config(run.config, run.overrides), 1)


def test_a_toy_ladder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("narrow", "tiny", "wide"):
        monkeypatch.setitem(models.FLAVORS, name, models.FLAVORS["nano"])  # removed again after the test
    _add_flavors()
    tiny.write_config(tmp_path / "tiny.toml", tiny.make_shards(tmp_path), tmp_path / "run")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    sweep = spec.load("sweep.toml")
    assert [run.name for run in sweep.runs[:3]] == [
        f"narrow_enable-{on}" for on in ("false/seed-1", "false/seed-2", "true/seed-1")
    ]
    assert "12 runs in all" in equal_runs.plan_text([sweep], 400.0, 1)
    run_ranks(1, _train_all, sweep.runs)
    collect(sweep)
    assert evidence.collect([sweep.folder], "ladder", tmp_path / "kept") == 12
    experiments = evidence.read_experiments(tmp_path / "kept")
    assert [one.name.split(",")[0] for one in experiments] == ["ladder: narrow", "ladder: tiny", "ladder: wide"]
    assert [[arm.name for arm in one.arms] for one in experiments] == [["pc off", "pc on"]] * 3
    assert [len(arm.losses.columns) for one in experiments for arm in one.arms] == [2] * 6
    tables, figure = evidence_report.report(tmp_path / "kept", margin=0.01)
    assert figure.stat().st_size > 1000
    text = tables.read_text()
    for one in experiments:
        assert f"## {one.name}" in text
    assert (
        text.count("| undecided |")
        + text.count("| better |")
        + text.count("| worse |")
        + text.count("| no difference |")
        == 3
    )

"""A ladder of two tiny models, from its sweep's file to the report."""

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
axes = { "pc.enable" = [false, true] }
[variants.narrow]
"model.flavor" = "narrow"
"training.steps" = 4
[variants.wider]
"model.flavor" = "tiny"
"training.steps" = 6
"""


def _train_all(rank: int, runs: list[spec.Run], narrow: models.Flavor) -> None:
    models.FLAVORS["narrow"] = narrow
    for run in runs:
        tiny.train(rank, Path(run.config), list(run.overrides))
        write_environment(run.folder, load_config(run.config, run.overrides), 1)


def test_a_toy_ladder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.add_tiny_flavor()
    monkeypatch.setitem(models.FLAVORS, "narrow", models.Flavor(dim=16, n_layers=2, n_heads=2, multiple_of=8))
    tiny.write_config(tmp_path / "tiny.toml", tiny.make_shards(tmp_path), tmp_path / "run")
    (tmp_path / "sweep.toml").write_text(SWEEP)
    sweep = spec.load("sweep.toml")
    assert "4 runs in all" in equal_runs.plan_text([sweep], 400.0, 1)
    run_ranks(1, _train_all, sweep.runs, models.FLAVORS["narrow"])
    collect(sweep)
    assert evidence.collect([sweep.folder], "ladder", tmp_path / "kept") == 4
    tables, figure = evidence_report.report(tmp_path / "kept", margin=0.01)
    assert figure.stat().st_size > 1000
    names = ["ladder: narrow, AdamW, 4 steps", "ladder: tiny, AdamW, 6 steps"]
    text = tables.read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == names
    assert text.count("| pc on | 0.01 | 0.01 | ") == 2

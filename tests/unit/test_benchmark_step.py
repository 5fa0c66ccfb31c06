import gc
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import pc
from helpers.tiny import add_tiny_flavor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = ["--flavor", "tiny", "--seq-len", "16", "--local-batch-size", "2", "--micro-batches", "3", "--rounds", "2"]


@pytest.fixture
def step(monkeypatch):
    """The module benchmarks/step.py, with a tiny flavor."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    add_tiny_flavor()
    import step

    yield step
    gc.enable()  # TorchTitan's trainer turns it off


def _eager(rows):
    return {
        "baseline": rows.Variant(rows.ADAMW, rows.EAGER),
        "pc": rows.Variant(rows.PC, rows.EAGER + rows.TF32),
        "in graph": rows.Variant(rows.PC, rows.EAGER + rows.IN_GRAPH + rows.KEEP_ALL),
        "stock": rows.Variant(rows.ADAMW, rows.EAGER, stock=True),
        "muon pc": rows.Variant("1b_muon_pc.toml", rows.EAGER),
        "flash": rows.Variant(rows.ADAMW, rows.EAGER, attention="FLASH_ATTENTION"),
        "full": rows.Variant(rows.ADAMW, rows.EAGER + rows.FULL),
    }


def test_a_row_end_to_end(step, monkeypatch, tmp_path, capsys):
    rows = sys.modules["rows"]
    goals = (rows.Goal("time pc / baseline", "<=", 1e9), rows.Goal("extra peak GiB pc - baseline", "<=", 3.0))
    monkeypatch.setitem(rows.ROWS, "all", rows.Row("every kind of variant", _eager(rows), micro_batches=3, goals=goals))
    step.main(["all", *SHAPE, "--output", str(tmp_path)])
    record = json.loads((tmp_path / "all.json").read_text())

    order = re.findall(r"round (\d)/2: (.+) [\d.]+ s", capsys.readouterr().err)
    assert order == [(str(i), name) for i in (1, 2) for name in _eager(rows)]  # A B A B
    assert record["command"] == "python benchmarks/step.py all " + " ".join([*SHAPE, "--output", str(tmp_path)])
    assert record["changed"] == {"flavor": "tiny", "seq_len": 16, "local_batch_size": 2}
    assert record["versions"]["torchtitan"] and record["commit"] and record["date"]

    variants = record["variants"]
    own = {
        "baseline": set(),
        "stock": set(),
        "flash": set(),
        "full": set(),
        "pc": {"pull_back", "restore_raw", "materialise"},
        "muon pc": {"pull_back", "restore_raw", "materialise"},
        "in graph": {"PC in forward", "PC in backward", "power iteration"},
    }
    for name, variant in variants.items():
        assert variant["tokens_per_step"] == 2 * 16 * 3
        assert set(variant["parts"]) == {"forward", "backward", "optimizer", "rest"} | own[name]
        for index, seconds in enumerate(variant["seconds"]):
            parts = [values[index] for values in variant["parts"].values()]
            assert all(part > 0 for part in parts), (name, variant["parts"])
            assert sum(parts) == pytest.approx(seconds)
    assert variants["pc"]["pc_state_gib"] > 0 == variants["baseline"]["pc_state_gib"]
    # parameters, gradients and two moments are the same in both; PC adds raw W, u and v, and gamma
    gammas = 4 * 4 * 8 / 2**30  # gamma, gradient and moments of eight matrices
    extra = variants["pc"]["held_gib"] - variants["baseline"]["held_gib"]
    assert extra == pytest.approx(variants["pc"]["pc_state_gib"] + gammas, rel=0.05)
    assert variants["stock"]["held_gib"] == pytest.approx(variants["baseline"]["held_gib"], rel=0.02)
    ratio = record["figures"]["time pc / baseline"]
    ratios = [a / b for a, b in zip(variants["pc"]["seconds"], variants["baseline"]["seconds"], strict=True)]
    assert (min(ratios), max(ratios)) == (ratio["smallest"], ratio["largest"])

    printed = rows.table(tmp_path)
    # goals apply only to the row's own shapes
    assert re.search(r"\| all \| time pc / baseline \|  \| [\d.e+-]+ \(.*n = 2\) \|  \|", printed)
    assert "| paper-batch | time pc / baseline | <= 1.003 | not run |  |" in printed
    record["changed"] = {}
    (tmp_path / "all.json").write_text(json.dumps(record))
    printed = rows.table(tmp_path)
    assert re.search(r"\| all \| time pc / baseline \| <= 1000000000.0 \| .* \| yes \|", printed)
    assert "| all | extra peak GiB pc - baseline | <= 3.0 | not measured |  |" in printed


def test_a_row_that_breaks_off_keeps_its_rounds_and_needs_no_git(step, monkeypatch, tmp_path):
    variant = {
        "seconds": [1.0],
        "peak_gib": None,
        "utilisation": None,
        "pc_state_gib": 0.0,
        "parts": {},
    }

    def measure(*_):
        monkeypatch.setenv("PATH", str(tmp_path))  # after git was called
        yield {"baseline": variant, "pc": variant}
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step, "measure", measure)
    with pytest.raises(torch.OutOfMemoryError):
        step.main(["pc", "--output", str(tmp_path)])
    record = json.loads((tmp_path / "pc.json").read_text())
    assert record["figures"]["time pc / baseline"]["n"] == 1 < record["rounds"] and record["commit"] != "unknown"
    assert step.about_this_run([])["commit"] == "unknown"


def test_every_goal_is_a_figure_and_every_config_loads(step, tmp_path):
    rows = sys.modules["rows"]
    for name, row in rows.ROWS.items():
        made_up = {
            variant: {
                "seconds": [1.0, 2.0], "peak_gib": [3.0, 3.0], "utilisation": 0.5, "pc_state_gib": 1.0,
                "parts": {"forward": [0.5, 0.5], "pull_back": [0.1, 0.2]},
            }
            for variant in row.variants
        }  # fmt: skip
        found = step.figures(made_up)
        assert {goal.figure for goal in row.goals} <= set(found), name
        for variant in row.variants.values():
            step.load_config(step.CONFIGS / variant.config, list(variant.overrides))


def test_compiled_pc_is_the_same(step, monkeypatch):
    # traced as usual, but not lowered, which takes half a minute
    monkeypatch.setattr(step, "_compiled", lambda function: torch.compile(function, backend="eager", fullgraph=True))
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 1, 6, 9, generator=generator, dtype=torch.float64)
    gamma, u, v = (torch.eye(n, dtype=torch.float64)[:1] for n in (1, 6, 9))

    def both_passes():
        config = pc.PCConfig()
        return (
            *pc.passes.materialise(config, weight, gamma, u, v),
            *pc.passes.pull_back(config, weight, gradient, gamma, u, v),
        )

    expected, plain = both_passes(), pc.polynomial.vjp
    with step.compiled_pc(True):
        assert pc.polynomial.vjp is not plain
        torch.testing.assert_close(both_passes(), expected)
    assert pc.polynomial.vjp is plain

"""Benchmarks with tiny shapes; a complete run of all_rows.py with `--tiny` is a soak test."""

import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pc import half

ROOT = Path(__file__).parents[2]
SHAPE = ["--flavor", "tiny", "--seq-len", "16", "--local-batch-size", "2", "--micro-batches", "3", "--rounds", "2"]


@pytest.fixture
def step(monkeypatch):
    """The module benchmarks/step.py, with a tiny flavor."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step

    yield step
    gc.enable()  # TorchTitan's trainer turns it off


def test_a_row_from_command_to_table(step, monkeypatch, tmp_path, capsys):
    rows = sys.modules["rows"]
    variants = {
        "baseline": rows.Variant(rows.ADAMW, rows.EAGER),
        "step": rows.Variant(rows.PC, rows.EAGER + rows.TF32),
        "in graph": rows.Variant(rows.PC, rows.EAGER, in_graph=True),
    }
    monkeypatch.setitem(rows.ROWS, "small", rows.Row("of a test", variants, micro_batches=3))
    step.main(["small", *SHAPE, "--output", str(tmp_path)])
    record = json.loads((tmp_path / "small.json").read_text())
    order = re.findall(r"round (\d)/2: (.+) [\d.]+ s", capsys.readouterr().err)
    assert order == [(str(i), name) for i in (1, 2) for name in variants]  # A B A B
    assert record["command"] == "python benchmarks/step.py small " + " ".join([*SHAPE, "--output", str(tmp_path)])
    assert record["changed"] == {"flavor": "tiny", "seq_len": 16, "local_batch_size": 2}
    assert record["versions"]["torchtitan"] and record["commit"] and record["date"]

    plain, in_step, in_graph = (record["variants"][name] for name in variants)
    assert plain["tokens_per_step"] == 2 * 16 * 3 and not plain["parts"]
    assert {"pull back", "write"} == set(in_step["parts"])
    for index, seconds in enumerate(in_step["seconds"]):
        assert 0 < sum(values[index] for values in in_step["parts"].values()) < seconds
    times = list(zip(*(of["seconds"] for of in (plain, in_step, in_graph)), strict=True))
    ratios, added = [b / a for a, b, _ in times], [(b - a) / (c - a) for a, b, c in times]
    for name, values in (("time step / baseline", ratios), ("time added by step / in graph", added)):
        found = record["figures"][name]
        assert (min(values), max(values), 2) == (found["smallest"], found["largest"], found["n"])


VARIANT = {"seconds": [1.0], "peak_gib": [3.0], "utilisation": 0.5}


def test_every_goal_is_a_figure_and_every_variant_loads(step):
    seconds = {"baseline": 1.0, "step": 2.0}
    for name, row in sys.modules["rows"].ROWS.items():
        made_up = {variant: VARIANT | {"seconds": [seconds.get(variant, 3.0)]} for variant in row.variants}
        assert {goal.figure for goal in row.goals} <= set(step.figures(made_up)), name
        for variant in row.variants.values():
            step.load_config(step.CONFIGS / variant.config, list(variant.overrides))


def test_all_rows_goes_on_where_it_stopped(step, monkeypatch, tmp_path, capsys):
    import all_rows

    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write"

    def task(name, code, seconds=60):
        return all_rows.Task(name, [sys.executable, "-c", f"{note}('{name} '); {code}"], seconds)

    chosen = [
        task("good", ""),
        task("bad", "raise SystemExit('error: no such thing')"),
        task("slow", "import time; time.sleep(600)", 3),
        task("last", ""),
    ]
    monkeypatch.setattr(all_rows, "tasks", lambda output, tiny: chosen)
    words = ["--tiny", "--minutes", "5", "--output", str(tmp_path / "out")]
    all_rows.main(words)
    state = json.loads((tmp_path / "out" / "all_rows.json").read_text())["state"]
    assert state == {"good": "done", "bad": "failed: error: no such thing", "slow": "over 3 s", "last": "done"}
    all_rows.main(words)  # finished tasks are not repeated
    assert ran.read_text().split() == ["good", "bad", "slow", "last", "bad", "slow"]
    assert "| bad | failed: error: no such thing |" in (tmp_path / "out" / "README.md").read_text()

    monkeypatch.setattr(all_rows, "tasks", lambda output, tiny: [task("new", "")])
    all_rows.main([*words[:1], "--minutes", "0.1", *words[3:]])  # too little time to start anything
    assert "new" not in ran.read_text() and "repeat the command" in capsys.readouterr().out
    monkeypatch.setattr(all_rows, "machine", lambda: {"hardware": "another"})
    with pytest.raises(SystemExit, match="2"):
        all_rows.main(words)
    assert "give another --output" in capsys.readouterr().err


@pytest.mark.parametrize("gib, halved", [(78, {"pc", "stock", "muon", "dtype", "checkpointing"}), (139, set())])
def test_large_rows_fit_the_memory(step, monkeypatch, tmp_path, gib, halved):
    """The estimate for whole micro-batches is 82 GiB for `pc` and `stock`, and 91 for `muon`."""
    import all_rows

    rows = sys.modules["rows"].ROWS
    monkeypatch.setattr(all_rows.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        all_rows.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * 2**30)
    )
    queue = [task for task in all_rows.tasks(tmp_path, tiny=False) if task.name in rows]
    assert {task.name for task in queue if "--local-batch-size" in task.command} == halved
    for name in halved:  # as many tokens per step
        batch, micro_batches = int(all_rows.HALVED[1]), int(all_rows.HALVED[3])
        assert batch * micro_batches == 4 * rows[name].micro_batches


def _table(monkeypatch, capsys, module, *words):
    """The cells of the table that a benchmark prints, without its heads."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *words])
    module.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_errors_by_precision(step, monkeypatch, capsys):
    import precision

    table = _table(monkeypatch, capsys, precision, "--width", "32", "--levels", "4")
    rows = {row[1]: [float(cell) for cell in row[2:]] for row in table}
    assert all(4 * one < other for one, other in zip(rows["float32"], rows["tf32"], strict=True))


def test_passes_beside_another_checkout(step, monkeypatch, capsys):
    import products

    words = [products.__file__, "--flavor", "tiny", "--precisions", "float32", "--rounds", "1", "--against"]
    monkeypatch.setattr(sys, "argv", [*words, str(ROOT)])
    products.main()
    assert set(json.loads(capsys.readouterr().out)["seconds"]["pull back"]) == {"before", "float32"}
    monkeypatch.setattr(sys, "argv", [*words, str(ROOT / "tests")])
    with pytest.raises(SystemExit):  # it uses the given checkout, not the installed one
        products.main()


def test_bytes_of_operations(step):
    import traffic

    x, square, vector = (torch.empty(shape, device="meta") for shape in ((2, 3), (2, 2), 2))
    for operation, elements in (
        (lambda: x @ x.mT, 6 + 4),
        (lambda: x @ x.clone().mT, 3 * 6 + 6 + 4),
        (lambda: square.add_(vector), 4 + 2 + 4),
        (lambda: torch._foreach_copy_([x, square], [x.half(), square]), 6 + 3 + 3 + 4 + 6 + 4),
        (lambda: torch.addmm(x, square, x, out=x), 6 + 4 + 6),
        (lambda: square.new_zeros(5).view(5, 1).mT, 5),
        (lambda: torch.empty_like(x), 0),
    ):
        with traffic.Traffic() as found:
            operation()
        assert sum(found.bytes.values()) == 4 * elements
    found = traffic.Traffic()
    with found.counting():
        half.add_transpose(square.half(), square.half())  # one kernel, which reads both
    assert found.calls["add_transpose"] == 1 and found.bytes["add_transpose"] == 2 * 8 + 8 + 4


def test_traffic_by_ranks(step, monkeypatch, capsys):
    import traffic

    words = ["--config", str(ROOT / "train_configs" / "debug.toml"), "--precisions", "float32", "--ranks", "1", "4"]
    alone, of_four = _table(monkeypatch, capsys, traffic, *words)
    assert alone[4:] == [alone[4], "0.000", "0"] and of_four[6] == "4"  # two all-to-alls for each pass
    flops = [float(row[4].split()[0]) for row in (alone, of_four)]
    assert 0.9 * flops[0] < 4 * flops[1] < 1.1 * flops[0]


@pytest.mark.soak
def test_all_rows_with_tiny_shapes(tmp_path):
    """From a clone that is not installed; twice, and the second run finds nothing to do."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, "benchmarks/all_rows.py", "--tiny", "--minutes", "60", "--output", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(words, cwd=tmp_path / "clone", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    state = json.loads((tmp_path / "all_rows.json").read_text())["state"]
    assert set(state.values()) == {"done"}, state
    passes = json.loads((tmp_path / "passes.json").read_text())
    assert len(passes["seconds"]["pull back"]["tf32"]) == 3


@pytest.mark.soak
def test_a_pull_back_can_start_before_the_backward_pass_ends():
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/order.py"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *events, order, bits = done.stdout.splitlines()
    names = [event[10:] for event in events]
    assert names.index("layer 3.0: pull back ends") < names.index("layer 2.0: backward begins")
    assert order.endswith("True") and bits.endswith("True")


@pytest.mark.soak
def test_a_row_on_two_ranks(tmp_path):
    words = ["benchmarks/step.py", "exchange", "--output", str(tmp_path), *SHAPE]
    words[words.index("tiny")] = "debug"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "exchange.json").read_text())["figures"]["time once / every micro-batch"]["n"] == 2

"""Order, limits and report of benchmarks/all_rows.py; a complete run with `--tiny` is a soak test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def all_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import all_rows

    return all_rows


def _task(all_rows, name, code):
    return all_rows.Task(name, [sys.executable, "-c", code], 60)


def test_goes_on_where_it_stopped(all_rows, monkeypatch, tmp_path, capsys):
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write"
    chosen = [
        _task(all_rows, "good", f"{note}('good ')"),
        _task(all_rows, "bad", f"{note}('bad '); raise SystemExit('error: no such thing')"),
        all_rows.Task("slow", [sys.executable, "-c", f"{note}('slow '); import time; time.sleep(600)"], 3),
        _task(all_rows, "last", f"{note}('last ')"),
    ]
    monkeypatch.setattr(all_rows, "tasks", lambda output, tiny: chosen)
    words = ["--tiny", "--minutes", "5", "--output", str(tmp_path / "out")]
    all_rows.main(words)
    state = json.loads((tmp_path / "out" / "all_rows.json").read_text())["state"]
    assert state == {"good": "done", "bad": "failed: error: no such thing", "slow": "over 3 s", "last": "done"}
    all_rows.main(words)  # finished tasks are not repeated
    assert ran.read_text().split() == ["good", "bad", "slow", "last", "bad", "slow"]
    assert "| bad | failed: error: no such thing |" in (tmp_path / "out" / "README.md").read_text()

    monkeypatch.setattr(all_rows, "tasks", lambda output, tiny: [_task(all_rows, "new", f"{note}('new ')")])
    all_rows.main([*words[:1], "--minutes", "0.1", *words[3:]])  # too little time to start anything
    assert "new" not in ran.read_text() and "repeat the command" in capsys.readouterr().out


def test_every_row_for_a_gpu_is_there_and_needs_one(all_rows, monkeypatch, tmp_path, capsys):
    assert set(all_rows.ORDER) <= set(all_rows.ROWS)
    # "exchange" needs several GPUs, "in-graph-eager" memory that no 80 GB GPU has
    elsewhere = {"exchange", "in-graph-eager"}
    elsewhere |= {name for name in all_rows.ROWS if "-cpu" in name or name.startswith("schedules")}
    assert set(all_rows.ROWS) - set(all_rows.ORDER) == elsewhere
    with pytest.raises(SystemExit):
        all_rows.main(["--output", str(tmp_path)])
    assert "--tiny" in capsys.readouterr().err


def test_rows_fit_80_gb(all_rows):
    """By the memory estimate, with the same tokens per step; on an H200 unchanged."""
    changed = {}
    for name in all_rows.ORDER:
        row, words = all_rows.ROWS[name], all_rows.smaller_batch(name, 79.0)
        batch = int(words[1]) if words else None
        assert all_rows.needed_gib(row, batch) <= 79
        if words:
            assert all_rows.needed_gib(row) > 79
            changed[name] = words[1::2]
        assert all_rows.smaller_batch(name, 139.0) == []
    assert changed == {"dtype": ["2", "20"], "checkpointing": ["2", "20"]}


def test_measured_beside_estimated(all_rows, tmp_path):
    record = {
        "changed": {"flavor": "debug", "seq_len": 16, "local_batch_size": 1, "micro_batches": 2},
        "variants": {"baseline": {"seconds": [2.0, 3.0]}},
        "figures": {"time pc / baseline": {"median": 1.25, "smallest": 1.2, "largest": 1.3, "n": 2}},
    }
    (tmp_path / "pc.json").write_text(json.dumps(record))
    text = all_rows.compared(tmp_path, tiny=True)
    assert "| pc: step without PC, s | 2.5 |" in text and "| pc: PC's share of it | 25 % |" in text


@pytest.mark.soak
def test_the_whole_with_tiny_shapes(tmp_path):
    """From a clone that is not installed. Twice: the second has nothing left to do."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, "benchmarks/all_rows.py", "--tiny", "--minutes", "60", "--output", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(words, cwd=tmp_path / "clone", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    state = json.loads((tmp_path / "all_rows.json").read_text())["state"]
    assert set(state.values()) == {"done"}, state
    assert "| pull back, tf32, ms |" in (tmp_path / "README.md").read_text()

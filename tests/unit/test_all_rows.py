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


def test_goes_on_where_it_stopped(all_rows, monkeypatch, tmp_path, capsys):
    ran = tmp_path / "ran"
    codes = {"good": "pass", "bad": "raise SystemExit('error: no such thing')", "slow": "import time; time.sleep(600)"}
    chosen = [
        all_rows.Task(name, [sys.executable, "-c", f"open({str(ran)!r}, 'a').write('{name} '); {code}"], 3)
        for name, code in codes.items()
    ]
    monkeypatch.setattr(all_rows, "tasks", lambda output, tiny: chosen)
    words = ["--tiny", "--output", str(tmp_path / "out"), "--minutes"]
    all_rows.main([*words, "5"])
    state = json.loads((tmp_path / "out" / "all_rows.json").read_text())["state"]
    assert state == {"good": "done", "bad": "failed: error: no such thing", "slow": "over 3 s"}
    all_rows.main([*words, "5"])  # finished tasks are not repeated
    assert ran.read_text().split() == ["good", "bad", "slow", "bad", "slow"]
    assert "| bad | failed: error: no such thing |" in (tmp_path / "out" / "README.md").read_text()
    all_rows.main([*words, "0.1"])  # too little time to start anything
    assert len(ran.read_text().split()) == 5 and "repeat the command" in capsys.readouterr().out


def test_every_row_for_a_gpu_fits_80_gb(all_rows, tmp_path, capsys):
    """By the memory estimate, with the same tokens per step; on an H200 unchanged."""
    # "exchange" needs several GPUs, the last two are for a CPU
    assert set(all_rows.ROWS) - set(all_rows.ORDER) == {"exchange", "stock-cpu", "schedules"}
    changed = {}
    for name in all_rows.ORDER:
        words = all_rows.smaller_batch(name, 79.0)
        assert all_rows.needed_gib(all_rows.ROWS[name], int(words[1]) if words else None) <= 79
        assert all_rows.smaller_batch(name, 139.0) == []
        if words:
            changed[name] = words[1::2]
    assert changed == {"dtype": ["2", "20"], "checkpointing": ["2", "20"]}
    with pytest.raises(SystemExit):
        all_rows.main(["--output", str(tmp_path)])
    assert "--tiny" in capsys.readouterr().err


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
    assert (tmp_path / "passes.json").is_file() and "| pc | time pc / baseline |" in (
        tmp_path / "README.md"
    ).read_text()

"""Results of sweeps that someone else, or a fault, has written."""

import json

import pytest

from pc.errors import UserError
from pc_recipe.runs.sweep import points

GOOD = {"config": "a.toml", "settings": {"optimizer.lr": 1e-3}, "validation_loss": 2.0, "spikes": 0}


@pytest.mark.parametrize(
    "line",
    ["[]", "5", "null", "{", "{}"]
    + [json.dumps(GOOD | odd) for odd in (
        {"settings": None}, {"settings": [1]}, {"config": 5}, {"name": "a\0b"}, {"validation_loss": "low"},
        {"validation_loss": float("nan")}, {"spikes": [1]},
    )],
)  # fmt: skip
def test_a_line_of_another_form(tmp_path, line):
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(UserError, match="results.jsonl: damaged, or of another form"):
        points.read_results(tmp_path)


def test_older_results(tmp_path):
    (tmp_path / "results.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert points.read_results(tmp_path) == [GOOD]

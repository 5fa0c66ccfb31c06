"""metrics.jsonl of long runs and of damaged ones."""

import json

import pytest

from pc.errors import UserError
from pc_recipe.files import json_lines
from pc_recipe.files.run_log import METRICS_FILE, find_last_step, note_start, read_log, read_logs

LINES = [{"step": step, "loss": 1 / step, "ä" * (step % 90): 0} for step in range(1, 1001)]


@pytest.fixture
def run(tmp_path):
    """A run whose file has a torn line after step 400, and a last line that a crash cut short."""
    texts = [json.dumps(line, ensure_ascii=False) for line in LINES]
    texts.insert(400, '{"step": 401, "lo')
    texts.insert(700, "[]")
    (tmp_path / METRICS_FILE).write_text("\n".join(texts) + '\n{"step": 1001, "loss')
    return tmp_path


def test_torn_lines_are_skipped_and_the_file_is_named_once(run, caplog):
    assert read_log(run).lines == LINES
    assert caplog.messages == [f"{run / METRICS_FILE}: skipped 2 damaged lines"]
    assert read_log(run, newest=700).lines == LINES[300:]


def test_from_the_end_the_lines_are_the_same(run, monkeypatch):
    monkeypatch.setattr(json_lines, "CHUNK", 7)
    assert list(json_lines.read_back(run / METRICS_FILE)) == LINES[::-1]


def test_lines_after_the_resumed_checkpoint_do_not_count(run):
    json_lines.cut_torn_end(run / METRICS_FILE)
    for step in (1000, 600, 700, 0):
        note_start(run, step)
        kept = LINES[: min(step, 600) if step < 1000 else step]
        assert read_log(run).lines == kept and read_log(run, newest=9).lines == kept[-9:]
    json_lines.append(run / METRICS_FILE, LINES[0])
    assert read_log(run).lines == LINES[:1]


@pytest.mark.parametrize(
    "line",
    ['{"loss": 1.0}', '{"step": null}', '{"step": "9"}', '{"step": 1, "loss": "x"}', f'{{"step": 1{"0" * 400}}}'],
)
def test_a_line_that_the_trainer_did_not_write_is_left_out(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text(f'{line}\n{{"step": 1}}\n{line}\n{{"step": 2}}\n{line}\n')
    assert read_log(tmp_path).lines == [{"step": 1}, {"step": 2}]
    assert read_log(tmp_path, newest=2).lines == [{"step": 1}, {"step": 2}]


def test_only_the_end_of_the_file_is_read_for_the_newest_lines(run, monkeypatch):
    read = []
    real = json.loads
    monkeypatch.setattr(json_lines.json, "loads", lambda text: read.append(text) or real(text))
    read_log(run, newest=9)
    assert len(read) < 15


def test_a_run_without_a_log_has_no_lines_and_cannot_be_compared(tmp_path):
    assert read_log(tmp_path).lines == read_log(tmp_path, newest=3).lines == []
    assert find_last_step(tmp_path) == 0 and read_log(tmp_path).seconds().empty
    with pytest.raises(UserError, match="metrics.jsonl: no such file; give a run's folder"):
        read_logs([tmp_path])

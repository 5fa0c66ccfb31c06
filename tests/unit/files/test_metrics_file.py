"""metrics.jsonl of long and of damaged runs."""

import json

import pytest

from pc_recipe.files import json_lines
from pc_recipe.files.run_log import METRICS_FILE, read_log, set_aside_metrics

LINES = [{"step": step, "loss": 1 / step, "text": "ä" * (step % 90)} for step in range(1, 1001)]


@pytest.fixture
def run(tmp_path):
    """Its file has a torn line after step 400, and at the end one that a crash cut short."""
    texts = [json.dumps(line, ensure_ascii=False) for line in LINES]
    texts.insert(400, '{"step": 401, "lo')
    texts.insert(700, "[]")
    (tmp_path / METRICS_FILE).write_text("\n".join(texts) + '\n{"step": 1001, "loss')
    return tmp_path


def test_torn_lines_are_skipped_and_the_file_is_named_once(run, caplog):
    assert read_log(run).lines == LINES
    assert caplog.messages == [f"{run / METRICS_FILE}: skipped 2 damaged lines"]
    assert read_log(run, newest=700).lines == LINES[300:]


@pytest.mark.parametrize("chunk", [7, 2**16])
def test_from_the_end_the_lines_are_the_same(run, chunk, monkeypatch):
    monkeypatch.setattr(json_lines, "CHUNK", chunk)
    found = list(json_lines.read_back(run / METRICS_FILE))
    content = (run / METRICS_FILE).read_bytes()
    assert [line for _, line in found] == LINES[::-1]
    assert all(content[begin:].startswith(b'{"step": %d,' % line["step"]) for begin, line in found)


def test_lines_after_the_checkpoint_are_set_aside(run):
    json_lines.cut_torn_end(run / METRICS_FILE)
    for step in (1000, 600, 600, 0):
        set_aside_metrics(run, step)
        assert read_log(run).lines == LINES[:step]
    assert read_log(run / "metrics.abandoned.jsonl").lines == LINES[600:] + LINES[:600]


@pytest.mark.parametrize("line", ['{"loss": 1.0}', '{"step": null}', '{"step": "9"}'])
def test_a_line_without_a_step_is_left_out(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text(f'{line}\n{{"step": 1}}\n{line}\n{{"step": 2}}\n{line}\n')
    assert read_log(tmp_path).lines == [{"step": 1}, {"step": 2}]
    assert read_log(tmp_path, newest=2).lines == [{"step": 1}, {"step": 2}]
    set_aside_metrics(tmp_path, 1)
    assert read_log(tmp_path).lines == [{"step": 1}]


def test_a_resume_reads_only_the_end(run, monkeypatch):
    read = []
    real = json.loads
    monkeypatch.setattr(json_lines.json, "loads", lambda text: read.append(text) or real(text))
    set_aside_metrics(run, 990)
    assert len(read) < 15

"""The time left, the bar and the console."""

import io
import logging
import sys
from pathlib import Path

import pytest
import torchtitan

from pc_recipe.config import Config
from pc_recipe.train.console import Console
from pc_recipe.train.progress import Progress


def _progress(steps=60, freq=20) -> Progress:
    config = Config()
    config.training.steps, config.validation.enable, config.validation.freq = steps, True, freq
    return Progress(config, prints=True)


def test_the_estimate_leaves_out_the_first_steps_and_counts_validations():
    progress = _progress()
    progress.add_steps(1, 300.0)
    progress.add_validation(10.0)
    assert progress.seconds_left(1) is None
    progress.add_steps(2, 50.0)
    assert progress.seconds_left(2) is None
    progress.add_steps(3, 1.0)
    assert progress.seconds_left(3) == 57 * 1.0 + 3 * 10.0  # after steps 20, 40 and 60
    for step in range(4, 61):
        progress.add_steps(step, 2.0)
    assert progress.seconds_left(45) == 15 * 2.0 + 10.0  # from the newest steps
    assert progress.seconds_left(60) == 0.0


def test_a_last_step_off_the_interval_is_validated_too():
    progress = _progress(steps=50, freq=20)
    progress.add_validation(10.0)
    for step in (7, 9):  # a resumed run, which logs every second step
        progress.add_steps(step, 1.0)
    assert progress.seconds_left(9) == 41 * 1.0 + 3 * 10.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class GoneTerminal(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stream, bar", [(Terminal(), True), (io.StringIO(), False), (GoneTerminal(), False)])
def test_a_bar_only_on_a_terminal(monkeypatch, stream, bar):
    monkeypatch.setattr(sys, "stderr", stream)
    progress = _progress()
    for step in range(1, 5):
        progress.add_steps(step, 1.0)
        progress.show(step)
    Console(stream).handle(logging.LogRecord("x", logging.INFO, "mine.py", 1, "a line", None, None))
    progress.close()
    assert ("4/60, 0:00:56 left" in stream.getvalue(), "|" in stream.getvalue()) == (bar, bar)


@pytest.mark.parametrize(
    "file, level, text, printed",
    [
        ("components/metrics.py", logging.INFO, "step:  1", False),
        ("components/metrics.py", logging.WARNING, "3 CUDA memory allocation retries.", True),
        ("tools/profiling.py", logging.INFO, "Dumping profiler traces at step 10", True),
        ("tools/utils.py", logging.WARNING, "Peak flops undefined for: NVIDIA L4, fallback to A100", False),
        ("/home/torchtitan/pc_recipe/train/trainer.py", logging.INFO, "step 1/60", True),
    ],
)
def test_what_is_left_out_of_the_console(file, level, text, printed):
    stream = io.StringIO()
    path = str(Path(torchtitan.__file__).parent / file)
    Console(stream).handle(logging.LogRecord("root", level, path, 1, text, None, None))
    assert (text in stream.getvalue()) == printed


def test_a_closed_terminal_does_not_end_the_run(capsys):
    """As after Ctrl-C ended `tee`."""
    Console(GoneTerminal()).handle(logging.LogRecord("root", logging.INFO, "mine.py", 1, "a line", None, None))
    assert capsys.readouterr().err == ""

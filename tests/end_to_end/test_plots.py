"""The plotting commands, run as a user runs them, on a small pair of run folders."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from helpers.made_runs import save_checkpoint, write_metrics

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_checkpoint(folder / "baseline", None)
    write_metrics(folder / "baseline")
    save_checkpoint(folder / "pc", "step")
    write_metrics(folder / "pc", gain=0.05, estimates=True)
    return folder / "baseline", folder / "pc"


def _run(monkeypatch, script, *words):
    """Exit status of the command."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    try:
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    except SystemExit as ending:
        return ending.code
    return 0


def _figures(folder):
    return {path.stem for path in folder.glob("*.png")}


def test_spectra_and_curves_of_a_pair(pair, tmp_path, monkeypatch, capsys):
    assert _run(monkeypatch, "spectra.py", *pair, "--output", tmp_path) == 0
    assert _figures(tmp_path) == {"histograms", "quantiles", "gmcn"}
    assert "baseline, step 7: without PC" in capsys.readouterr().out
    stored = sorted(tmp_path.glob("*.npz"))
    assert [path.name[:-13] for path in stored] == ["baseline-step-7", "pc-step-7"]  # and a hash
    before = (tmp_path / "histograms.png").read_bytes()
    assert _run(monkeypatch, "spectra.py", *stored, "--output", tmp_path) == 0
    assert (tmp_path / "histograms.png").read_bytes() == before  # from the stored values, the same figure

    shutil.copy(stored[0], pair[0])
    shutil.copy(stored[1], pair[1])
    beside_metrics = [run / path.name for run, path in zip(pair, stored, strict=True)]
    assert _run(monkeypatch, "spectra.py", *beside_metrics, "--output", tmp_path / "again") == 0
    assert _figures(tmp_path / "again") == {"histograms", "quantiles", "gmcn"}

    assert _run(monkeypatch, "curves.py", *pair, "--output", tmp_path / "curves") == 0
    assert _figures(tmp_path / "curves") == {"validation_loss", "activation_rms", "estimator_error"}
    assert "pc" in (tmp_path / "curves" / "summary.md").read_text()


def test_a_run_without_health_still_gives_its_curve(tmp_path, monkeypatch, capsys):
    write_metrics(tmp_path / "bare", health=False)
    assert _run(monkeypatch, "curves.py", tmp_path / "bare", "--output", tmp_path / "out") == 0
    assert _figures(tmp_path / "out") == {"validation_loss"}
    said = capsys.readouterr().out
    assert "no figure of activation sizes" in said and "no figure of estimator error" in said


@pytest.mark.parametrize(
    "words, message",
    [
        (["spectra.py", "{tmp}/short"], "no run with a complete checkpoint"),
        (["polynomials.py", "--cutoff", "2"], "cutoff"),
        (["polynomials.py", "--degree", "3"], "--degree and --alpha need --cutoff"),
    ],
)
def test_mistakes_give_one_line(words, message, tmp_path, monkeypatch, capsys):
    write_metrics(tmp_path / "short", steps=3)
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    assert _run(monkeypatch, *words, "--output", tmp_path / "out") == 2
    *usage, error = capsys.readouterr().err.splitlines()  # argparse's own errors repeat the usage
    assert "error: " in error and message in error and "Traceback" not in usage


def test_commands_that_need_no_run(tmp_path, monkeypatch, capsys):
    assert _run(monkeypatch, "polynomials.py", "--cutoff", "0.25", "--degree", "5", "--output", tmp_path) == 0
    assert _run(monkeypatch, "theorem.py", "--steps", "100", "--output", tmp_path) == 0
    config = SCRIPTS.parent / "train_configs" / "1b_adamw_pc.toml"
    assert _run(monkeypatch, "cost.py", config, "--output", tmp_path) == 0
    assert _figures(tmp_path) == {"polynomials", "theorem"}
    assert "0.391 %" in (tmp_path / "cost.md").read_text()
    assert "inside the region R at every one of 100 steps: yes" in capsys.readouterr().out

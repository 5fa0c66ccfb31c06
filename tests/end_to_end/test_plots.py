"""The plotting commands, run as a user runs them, on a small pair of run folders."""

import re

from helpers.made_runs import save_checkpoint, write_metrics
from helpers.tiny import ROOT


def _figures(folder):
    return {path.stem for path in folder.glob("*.png")}


def test_spectra_of_a_pair(command, tmp_path):
    pair = tmp_path / "baseline", tmp_path / "pc"
    for run, with_pc in zip(pair, (False, True), strict=True):
        save_checkpoint(run, with_pc)
        write_metrics(run, gain=0.05 * with_pc, estimates=with_pc)
    assert command("spectra.py", *pair, "--output", tmp_path, "--report")[0] == 0
    assert _figures(tmp_path) == {"histograms", "gmcn"}
    page = (tmp_path / "report.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page)[1:4] == ["baseline", "pc, W", "pc, PC(W)"]
    assert re.findall(r"<p class=advice>(\w+ \w+)", page) == ["Will PC", "Trained with", "Trained with"]


def test_commands_without_a_run(command, tmp_path):
    status, said, _ = command("polynomials.py", "--cutoff", "0.25", "--degree", "5", "--output", tmp_path)
    assert status == 0 and said.startswith("level = [4.25577") and _figures(tmp_path) == {"polynomials"}
    status, said, _ = command("theorem.py", "--steps", "100")
    assert status == 0 and "inside the region R at every one of 100 steps: yes" in said
    assert command("cost.py", ROOT / "train_configs" / "1b_adamw_pc.toml", "--output", tmp_path)[0] == 0
    assert "0.391 %" in (tmp_path / "cost.md").read_text()
    status, _, err = command("spectra.py", tmp_path, "--output", tmp_path)
    assert status == 2 and err.startswith("error: ") and "no run with a complete checkpoint" in err

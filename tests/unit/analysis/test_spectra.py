import math

import pytest
import torch

from helpers.made_runs import save_checkpoint
from pc.analysis import spectra, spectra_plots
from pc.analysis.figures import draw_spectra
from pc.config import BLOCK_SUFFIXES
from pc.errors import UserError


@pytest.mark.parametrize("schedule, level", [("step", 4), ("forward", {"o": 2, "ffn": 4}), (None, 4)])
def test_singular_values_are_those_of_the_weights(tmp_path, schedule, level):
    merged = save_checkpoint(tmp_path / "run", schedule, level=level)
    for step in (3, 12):  # an older and a newer one that are not complete
        (tmp_path / "run" / "checkpoint" / f"step-{step}").mkdir()
    (found,) = spectra.of_sources([tmp_path / "run"], tmp_path / "out")
    assert found.step == 7 and found.num_layers == 2
    assert found.pc_blocks == (("o", "gate", "down", "up") if schedule else ())
    for block, (suffix, *_) in BLOCK_SUFFIXES.items():
        for layer in range(2):
            weight = merged.get_submodule(f"layers.{layer}.{suffix}").weight.detach()
            expected = torch.linalg.svdvals(weight.double())
            # The weights are float32; in schedule "forward" PC(W) is recomputed from them.
            torch.testing.assert_close(found.effective[block][layer].double(), expected, rtol=1e-5, atol=1e-6)
            changed = not torch.allclose(found.raw[block][layer], found.effective[block][layer], rtol=1e-2)
            assert changed == (block in found.pc_blocks)
    (stored,) = (tmp_path / "out").glob("run-step-7-*.npz")
    assert stored.stat().st_size < 20_000
    again = spectra.load(stored)
    assert (again.name, again.step, again.pc_blocks) == (found.name, found.step, found.pc_blocks)
    for block in found.raw:  # stored in float32
        torch.testing.assert_close(again.effective[block].double(), found.effective[block].double(), rtol=1e-6, atol=0)


def test_stored_values_are_those_of_the_run_and_used_until_it_has_a_newer_checkpoint(tmp_path, monkeypatch):
    runs = [tmp_path / folder for folder in ("a/lr-1/seed-0", "a/lr-2/seed-0", "b/lr-1/seed-0")]
    for run, schedule in zip(runs, ("step", None, None), strict=True):
        save_checkpoint(run, schedule)
        spectra.of_sources([run], tmp_path / "out")
    compute = spectra.compute
    monkeypatch.setattr(spectra, "compute", None)  # all three are read
    found = spectra.of_sources(runs, tmp_path / "out")
    assert [item.name for item in found] == ["a/lr-1/seed-0", "a/lr-2/seed-0", "b/lr-1/seed-0"]
    assert [bool(item.pc_blocks) for item in found] == [True, False, False]
    monkeypatch.setattr(spectra, "compute", compute)
    save_checkpoint(runs[0], None)
    assert not spectra.of_sources(runs[:1], tmp_path / "out")[0].pc_blocks


def test_each_checkpoint_has_its_own_legend(tmp_path, monkeypatch):
    legends = []
    keep = spectra_plots.save

    def save(figure, path):
        shown = [axes.get_legend() for axes in figure.axes] + figure.legends
        legends.append([text.get_text() for legend in shown if legend for text in legend.get_texts()])
        return keep(figure, path)

    monkeypatch.setattr(spectra_plots, "save", save)
    for folder, step in (("a/run", 7), ("a/run", 8), ("b/run", 7)):
        save_checkpoint(tmp_path / folder, None, step)
    first, second = (tmp_path / "a/run/checkpoint" / f"step-{step}" for step in (7, 8))
    draw_spectra([first, second, tmp_path / "b/run", first], tmp_path / "out", None)
    assert legends == 2 * [["a/run/step-7", "a/run/step-8", "b/run"]]


def test_gmcn_is_the_geometric_mean(tmp_path):
    save_checkpoint(tmp_path / "run", "step")
    (found,) = spectra.of_sources([tmp_path / "run"], tmp_path)
    conditions = []
    for block in ("q", "o"):
        for sigma in found.effective[block]:
            conditions.append((sigma[0] / sigma[-math.ceil(len(sigma) / 10) :].mean()).item())
    assert found.gmcn(["q", "o"]) == pytest.approx(math.prod(conditions) ** 0.25, rel=1e-9)
    text = spectra.table([found])
    assert "raw W" in text and "PC(W) in o, gate, down, up" in text
    with pytest.raises(UserError, match="layers 1 to 2"):
        spectra_plots.plot_histograms([found], [3], tmp_path)

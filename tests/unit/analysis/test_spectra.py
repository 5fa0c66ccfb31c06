import math

import pytest
import torch

from helpers.made_runs import save_checkpoint
from pc.analysis import spectra, spectra_plots
from pc.analysis.figures import draw_spectra
from pc.common.run_folder import newest_checkpoint
from pc.config import BLOCK_SUFFIXES
from pc.errors import UserError


@pytest.fixture(autouse=True)
def _in_order_of_steps(tmp_path):
    """With an older checkpoint and an incomplete newer one in the folder."""
    for step in (3, 12):
        (tmp_path / "run" / "checkpoint" / f"step-{step}").mkdir(parents=True)


@pytest.mark.parametrize("schedule, level", [("step", 4), ("forward", 4), ("forward", {"o": 2, "ffn": 4}), (None, 4)])
def test_singular_values_are_those_of_the_weights(tmp_path, schedule, level):
    merged = save_checkpoint(tmp_path / "run", schedule, level=level)
    output = tmp_path / "out"
    found = spectra.of_sources([tmp_path / "run"], output)[0]
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
    (stored,) = output.glob("run-step-7-*.npz")
    assert stored.stat().st_size < 20_000
    again = spectra.load(stored)
    assert (again.name, again.step, again.pc_blocks) == (found.name, found.step, found.pc_blocks)
    for block in found.raw:  # stored in float32
        torch.testing.assert_close(again.effective[block].double(), found.effective[block].double(), rtol=1e-6, atol=0)


def test_stored_values_are_used_again_unless_the_checkpoint_is_newer(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "run", "step")
    first = spectra.of_sources([tmp_path / "run"], tmp_path / "out")[0]
    calls = []
    compute = spectra.compute
    monkeypatch.setattr(spectra, "compute", lambda *a: calls.append(a) or compute(*a))
    assert spectra.of_sources([tmp_path / "run"], tmp_path / "out")[0].step == first.step and not calls
    save_checkpoint(tmp_path / "run", None)
    assert spectra.of_sources([tmp_path / "run"], tmp_path / "out")[0].pc_blocks == () and calls


def test_runs_with_equal_names_keep_their_stored_values(tmp_path, monkeypatch):
    runs = [tmp_path / folder for folder in ("a/lr-1/seed-0", "a/lr-2/seed-0", "b/lr-1/seed-0")]
    for run, schedule in zip(runs, ("step", None, None), strict=True):
        save_checkpoint(run, schedule)
        (found,) = spectra.of_sources([run], tmp_path / "out")
        assert bool(found.pc_blocks) == (schedule == "step")
    monkeypatch.setattr(spectra, "compute", None)  # all three are read
    found = spectra.of_sources(runs, tmp_path / "out")
    assert [item.name for item in found] == ["a/lr-1/seed-0", "a/lr-2/seed-0", "b/lr-1/seed-0"]
    assert [bool(item.pc_blocks) for item in found] == [True, False, False]


def _legends(monkeypatch):
    """Collects the labels of every legend that is drawn, one list for each figure."""
    found = []
    keep = spectra_plots.save

    def save(figure, path):
        legends = [axes.get_legend() for axes in figure.axes] + figure.legends
        found.append([text.get_text() for legend in legends if legend for text in legend.get_texts()])
        return keep(figure, path)

    monkeypatch.setattr(spectra_plots, "save", save)
    return found


def test_each_checkpoint_has_its_own_legend(tmp_path, monkeypatch):
    for folder, step in (("a/run", 7), ("a/run", 8), ("b/run", 7), ("b/other", 7)):
        save_checkpoint(tmp_path / folder, None, step)
    first, second = (tmp_path / "a/run/checkpoint" / f"step-{step}" for step in (7, 8))
    legends = _legends(monkeypatch)
    draw_spectra([first, second], tmp_path / "out", None)
    assert legends == 2 * [["run/step-7", "run/step-8"]]
    legends.clear()
    draw_spectra([tmp_path / "a/run", tmp_path / "b/run", tmp_path / "b/other"], tmp_path / "out", None)
    assert legends == 2 * [["a/run", "b/run", "b/other"]]
    legends.clear()
    draw_spectra([first, second, tmp_path / "b/run", first], tmp_path / "out", None)
    assert legends == 2 * [["a/run/step-7", "a/run/step-8", "b/run"]]


def test_gmcn_is_the_geometric_mean(tmp_path):
    save_checkpoint(tmp_path / "run", "step")
    found = spectra.compute(newest_checkpoint(tmp_path / "run"), "run")
    conditions = []
    for block in ("q", "o"):
        for sigma in found.effective[block]:
            conditions.append((sigma[0] / sigma[-math.ceil(len(sigma) / 10) :].mean()).item())
    assert found.gmcn(["q", "o"]) == pytest.approx(math.prod(conditions) ** 0.25, rel=1e-9)
    text = spectra.table([found])
    assert "raw W" in text and "PC(W) in o, gate, down, up" in text


def test_figures(tmp_path):
    with_pc = save_checkpoint(tmp_path / "run", "step") and spectra.of_sources([tmp_path / "run"], tmp_path)[0]
    save_checkpoint(tmp_path / "plain", None)
    plain = spectra.of_sources([tmp_path / "plain"], tmp_path)[0]
    for path in (
        spectra_plots.plot_histograms([plain, with_pc], None, tmp_path),
        spectra_plots.plot_quantiles([plain, with_pc], tmp_path),
    ):
        assert path.stat().st_size > 5000
    with pytest.raises(UserError, match="layers 1 to 2"):
        spectra_plots.plot_histograms([plain], [3], tmp_path)


def test_what_holds_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="nothing: no run with a complete checkpoint"):
        spectra.of_sources([tmp_path / "nothing"], tmp_path)

import math
import os

import pytest
import torch

from helpers.made_runs import save_checkpoint
from pc.analysis import spectra
from pc.analysis.figures import draw_spectra
from pc.config import BLOCK_SUFFIXES
from pc.errors import UserError


@pytest.mark.parametrize("schedule, level", [("step", 4), ("forward", {"o": 2, "ffn": 4}), (None, 4)])
def test_singular_values_are_those_of_the_weights(tmp_path, schedule, level):
    merged = save_checkpoint(tmp_path / "run", schedule, level=level)
    for step in (3, 12):  # an older and a newer one that are not complete
        (tmp_path / "run" / "checkpoint" / f"step-{step}").mkdir()
    (found,) = spectra.of_sources([tmp_path / "run"])
    assert found.step == 7 and found.num_layers == 2
    assert found.pc_blocks == (("o", "gate", "down", "up") if schedule else ())
    for block, (suffix, *_) in BLOCK_SUFFIXES.items():
        for layer in range(2):
            weight = merged.get_submodule(f"layers.{layer}.{suffix}").weight.detach()
            expected = torch.linalg.svdvals(weight.double())
            # The weights are float32; in schedule "forward" PC(W) is recomputed from them.
            torch.testing.assert_close(found.effective[block][layer], expected, rtol=1e-5, atol=1e-6)
            changed = not torch.allclose(found.raw[block][layer], found.effective[block][layer], rtol=1e-2)
            assert changed == (block in found.pc_blocks)


def test_spectra_stay_with_the_run_until_it_has_a_newer_checkpoint(tmp_path):
    run = tmp_path / "run"
    save_checkpoint(run, "step")
    assert spectra.of_sources([run])[0].pc_blocks
    (run / "checkpoint").rename(tmp_path / "gone")
    assert spectra.of_sources([run])[0].pc_blocks
    save_checkpoint(run, None)
    later = (run / "spectra" / "step-7.npz").stat().st_mtime + 1
    os.utime(run / "checkpoint" / "step-7" / ".metadata", (later, later))
    assert not spectra.of_sources([run])[0].pc_blocks


def test_each_checkpoint_has_its_own_legend(tmp_path, monkeypatch):
    legends = []
    keep = spectra.save

    def save(figure, path):
        legends.append([text.get_text() for legend in figure.legends for text in legend.get_texts()])
        return keep(figure, path)

    monkeypatch.setattr(spectra, "save", save)
    for folder, step in (("a/run", 7), ("a/run", 8), ("b/run", 7)):
        save_checkpoint(tmp_path / folder, None, step)
    first, second = (tmp_path / "a/run/checkpoint" / f"step-{step}" for step in (7, 8))
    draw_spectra([first, second, tmp_path / "b/run", first], tmp_path / "out", None)
    assert legends == [["a/run/step-7", "a/run/step-8", "b/run"]]


def test_gmcn_is_the_geometric_mean(tmp_path):
    save_checkpoint(tmp_path / "run", "step")
    (found,) = spectra.of_sources([tmp_path / "run"])
    conditions = []
    for block in ("q", "o"):
        for sigma in found.effective[block]:
            conditions.append((sigma[0] / sigma[-math.ceil(len(sigma) / 10) :].mean()).item())
    assert found.gmcn(["q", "o"]) == pytest.approx(math.prod(conditions) ** 0.25, rel=1e-9)
    text = spectra.table([found])
    assert "raw W" in text and "PC(W) in o, gate, down, up" in text
    with pytest.raises(UserError, match="layers 1 to 2"):
        spectra.plot([found], [3], tmp_path)

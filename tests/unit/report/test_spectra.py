import pytest
import torch

from helpers.made_runs import save_checkpoint
from pc.blocks import BLOCK_SUFFIXES
from pc.errors import UserError
from pc_recipe.report import spectra


@pytest.mark.parametrize("with_pc, level", [(True, {"o": 2, "ffn": 4}), (False, 4)])
def test_singular_values_are_those_of_the_weights(tmp_path, with_pc, level):
    merged = save_checkpoint(tmp_path / "run", with_pc, level=level)
    for step in (3, 12):  # incomplete checkpoints, one older and one newer
        (tmp_path / "run" / "checkpoint" / f"step-{step}").mkdir()
    (checkpoint,) = spectra.named_checkpoints([tmp_path / "run"]).values()
    found = spectra.compute(checkpoint, [1, 2])
    assert {layer for layer, _ in found} == {1, 2} and {block for _, block in found} == {"o", "gate", "up", "down"}
    for (layer, block), sigma in found.items():
        weight = merged.get_submodule(f"layers.{layer - 1}.{BLOCK_SUFFIXES[block][0]}").weight.detach()
        torch.testing.assert_close(sigma, torch.linalg.svdvals(weight.double()), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="layers 1 to 2"):
        spectra.compute(checkpoint, [3])

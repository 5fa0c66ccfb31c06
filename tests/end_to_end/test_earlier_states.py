"""States that were saved before a weight could be several matrices still load, and training goes on as it did.

`tests/golden/earlier_states.zip`: of the library, states after two steps and after four, by schedule; of the trainer, by
schedule, the checkpoint of step 2 (tiny config, width 8, one layer).
"""

import shutil
from pathlib import Path

import pytest
import torch

import pc
from helpers import tiny
from helpers.ranks import run_ranks
from helpers.toy import toy_batch, toy_loss, toy_model

SAVED = Path(__file__).parents[1] / "golden" / "earlier_states.zip"
SCHEDULES = pytest.mark.parametrize("schedule", ["step", "forward"])


@SCHEDULES
def test_a_state_of_the_library(schedule, tmp_path):
    shutil.unpack_archive(SAVED, tmp_path)
    saved = torch.load(tmp_path / "library.pt", weights_only=True)[schedule]
    model = pc.attach(toy_model(seed=1), pc.PCConfig(schedule=schedule))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = {"model": model, "optimizer": optimizer, "schedule": pc.schedule(model, optimizer)}
    for name, state in saved["before"].items():
        parts[name].load_state_dict(state)
    for step in (2, 3):
        toy_loss(model, toy_batch(step)).backward()
        parts["schedule"].pull_back()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in saved["after"]["model"].items():
        # float64 sums in another order on another machine, amplified by AdamW
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-9)


def _resumed(rank, config, overrides):
    """All tensors as loaded, and after one step."""
    from pc.settings.models import FLAVORS, Flavor

    FLAVORS["tiny"] = Flavor(dim=8, n_layers=1, n_heads=2, multiple_of=8)
    trainer = tiny.make_trainer(config, overrides)
    trainer.load()
    states = [tiny.state_of(trainer)]
    trainer.step += 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    states.append(tiny.state_of(trainer))
    trainer.close()
    return states


@SCHEDULES
def test_a_checkpoint_of_the_trainer(schedule, tiny_config, tmp_path):
    from pc.titan.checkpoint_folder import CheckpointFolder

    config, folder = tiny_config
    shutil.unpack_archive(SAVED, tmp_path)
    checkpoint = shutil.copytree(tmp_path / schedule / "step-2", folder / "checkpoint" / "step-2")
    words = ["--pc.schedule", schedule, "--checkpoint.exclude_from_loading", "dataloader"]
    loaded, trained = run_ranks(1, _resumed, config, words)[0]
    names = [name for name in loaded if name.startswith("pc.") or not name.endswith("gamma")]
    for name, tensor in CheckpointFolder(checkpoint).read_tensors(names).items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-5, atol=1e-7)  # PC(W) is computed anew
    changed = "pc.layers.0.attention.wo.raw" if schedule == "step" else "layers.0.attention.wo.weight"
    assert 0 < (trained[changed] - loaded[changed]).abs().max() < 2e-2  # twice the learning rate

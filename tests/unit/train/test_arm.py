"""A class that a config names is called around every optimizer step, and counts as a setting of the run."""

import pytest
import torch

from helpers import tiny
from helpers.ranks import run_ranks
from pc.errors import UserError
from pc_recipe.config import Config, load_config
from pc_recipe.config.run_key import differing_keys, result_key
from pc_recipe.train.arm import Arm, make_arm

BASELINE = ["--pc.enable", "false", "--optimizer.lr", "0.0", "--checkpoint.interval", "2"]
CALLS = []


class Shrinks(Arm):
    """Makes o `factor` times as large after each step."""

    def __init__(self, parts, optimizers, config, factor: float) -> None:
        super().__init__(parts, optimizers, config)
        self.factor, self.weight = factor, parts[0].layers["0"].attention.wo.weight

    def before_step(self, step: int) -> None:
        gradients = [p.grad.full_tensor() for part in self.parts for p in part.parameters()]
        CALLS.append((step, torch.stack([g.norm() for g in gradients]).norm().item()))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        self.weight.mul_(self.factor)


def words(factor: float) -> list[str]:
    return ["--experiment.arm", f"{__name__}:Shrinks", "--experiment.options", f"{{factor = {factor}}}"]


def train(rank, config, options):
    """The final state, and the step and gradient norm of each call of `before_step`."""
    return tiny.train(rank, config, options), CALLS


def test_an_arm_is_called_around_each_step_with_clipped_gradients(tmp_path, tiny_shards):
    config = tiny.write_config(tmp_path / "tiny.toml", tiny_shards, tmp_path / "run")
    options = [*BASELINE, *words(0.5), "--training.max_norm", "0.01", "--training.steps"]
    [(first, calls)] = run_ranks(1, train, config, [*options, "2"])
    [(resumed, more)] = run_ranks(1, train, config, [*options, "4"])
    assert [step for step, _ in calls + more] == [1, 2, 3, 4]
    assert all(norm == pytest.approx(0.01, rel=1e-4) for _, norm in calls + more)
    name = "layers.0.attention.wo.weight"
    assert torch.equal(resumed[name], first[name] / 4) and first[name].any()


@pytest.mark.parametrize(
    "arm, options, said",
    [
        ("no.such:Arm", "{}", "No module named 'no'"),
        (f"{__name__}:Missing", "{}", "has no attribute 'Missing'"),
        (f"{__name__}:Shrinks", "{size = 2.0}", "missing a required argument: 'factor'"),
    ],
)
def test_a_class_that_cannot_be_made_is_one_line(arm, options, said):
    config = load_config(
        tiny.ROOT / "train_configs" / "debug.toml", ["--experiment.arm", arm, "--experiment.options", options]
    )
    with pytest.raises(UserError, match=said) as raised:
        make_arm([], None, config)
    assert "experiment.arm = " in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(UserError, match="experiment.arm"):
        load_config(tiny.ROOT / "train_configs" / "debug.toml", ["--experiment.arm", "module.Class"])


def test_class_options_and_the_files_that_they_name_decide_the_result(tmp_path):
    file = tmp_path / "reference"
    file.write_text("1")

    def key(arm: str = "pc_recipe.train.arm:Arm", **options) -> dict:
        return result_key(Config(experiment={"arm": arm, "options": options}))

    before = key(spectrum=str(file))
    assert before["content of experiment.arm"] and not differing_keys(before, key(spectrum=str(file)))
    assert differing_keys(before, key("other:Class", spectrum=str(file)))
    assert differing_keys(before, key(spectrum=str(file), power=0.5)) == ["experiment.options"]
    file.write_text("2")
    assert differing_keys(before, key(spectrum=str(file))) == ["content of experiment.options.spectrum"]
    assert not any("experiment" in name for name in result_key(Config()))

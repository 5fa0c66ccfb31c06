"""A class that a config names, with its options, and that counts as a setting of the run."""

import pytest

from helpers import tiny
from pc.errors import UserError
from pc_recipe.config import Config, load_config
from pc_recipe.config.run_key import differing_keys
from pc_recipe.train.arm import Arm, make_arm
from pc_recipe.train.inputs import result_key

DEBUG = tiny.ROOT / "train_configs" / "debug.toml"


class Shrinks(Arm):
    """Takes an option."""

    def __init__(self, parts, optimizers, config, factor: float) -> None:
        super().__init__(parts, optimizers, config)
        self.factor = factor


def test_a_config_names_its_class_and_gives_the_options():
    """When it is called: test_trainer.py."""
    words = ["--experiment.arm", f"{__name__}:Shrinks", "--experiment.options", "{factor = 0.5}"]
    made = make_arm(["part"], "optimizers", config := load_config(DEBUG, words))
    assert type(made) is Shrinks and made.factor == 0.5
    assert (made.parts, made.optimizers, made.config) == (["part"], "optimizers", config)
    assert type(make_arm([], None, Config())) is Arm


@pytest.mark.parametrize(
    "arm, options, said",
    [
        ("no.such:Arm", "{}", "No module named 'no'"),
        (f"{__name__}:Missing", "{}", "has no attribute 'Missing'"),
        (f"{__name__}:Shrinks", "{size = 2.0}", "missing a required argument: 'factor'"),
    ],
)
def test_a_class_that_cannot_be_made_is_one_line(arm, options, said):
    config = load_config(DEBUG, ["--experiment.arm", arm, "--experiment.options", options])
    with pytest.raises(UserError, match=said) as raised:
        make_arm([], None, config)
    assert "experiment.arm = " in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(UserError, match="experiment.arm"):
        load_config(DEBUG, ["--experiment.arm", "module.Class"])


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

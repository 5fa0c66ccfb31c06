"""What attaching PC to TorchTitan's Llama leaves of a plain one."""

from types import SimpleNamespace

import pytest
import torch

from pc import PCConfig
from pc_recipe.train.llama2 import Llama2, model_args
from pc_recipe.train.parallelize import _attach_pc


@pytest.mark.parametrize("mode", ["step", "forward"])
def test_the_models_state_is_that_of_a_plain_llama(mode):
    """The checkpoint has gamma, u and v in the state "pc", also in mode "forward", where the model has them too."""
    with torch.device("meta"):
        model, plain = Llama2(model_args("nano")), Llama2(model_args("nano"))
    _attach_pc(model, SimpleNamespace(pp_enabled=False), PCConfig(mode=mode))
    assert model.state_dict().keys() == plain.state_dict().keys()

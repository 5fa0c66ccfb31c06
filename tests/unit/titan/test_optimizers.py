"""Each parameter is trained by one optimizer, as its block asks for; a loaded state leaves the config's settings."""

import torch

from pc.settings import Config
from pc.titan.llama2 import Llama2, model_args
from pc.titan.optimizers import Optimizers


def _made(**settings):
    config = Config(optimizer={"name": "Muon", "muon_heads": ["q", "k"], **settings}).optimizer
    torch.manual_seed(0)
    model = Llama2(model_args("nano", vocab_size=64))
    model.init_weights()
    return model, Optimizers([model], config)


def test_each_parameter_has_one_optimizer_and_heads_are_matrices_of_their_own():
    model, made = _made()
    muon, adamw = made.optimizers
    matrices, heads = muon.param_groups
    assert heads["cut"] and not matrices.get("cut")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [[names[id(p)] for p in group["params"]] for group in (matrices, heads, *adamw.param_groups)]
    assert sorted(sum(trained, [])) == sorted(names.values())
    assert all(name.endswith(("wq.weight", "wk.weight")) for name in trained[1]) and len(trained[1]) == 2 * len(
        model.layers
    )
    assert not any("layers." in name and "norm" not in name for name in trained[2])


def test_a_loaded_state_leaves_the_settings_of_the_config():
    model, made = _made(lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    saved = {key: torch.as_tensor(value).clone() for key, value in made.state_dict().items() if torch.is_tensor(value)}
    _, other = _made(lr=2e-2)
    other.load_state_dict(made.state_dict())
    loaded = other.state_dict()
    assert saved and all(torch.equal(loaded[key], tensor) for key, tensor in saved.items() if key.startswith("state."))
    assert {group["lr"] for optimizer in other.optimizers for group in optimizer.param_groups} == {2e-2}

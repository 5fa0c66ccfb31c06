"""One optimizer trains each parameter, with the settings of its block; a loaded state keeps the config's settings."""

from typing import get_args

import pytest
import torch

import pc
from helpers.tiny import model_args
from pc_recipe.config import Config
from pc_recipe.config.optimizers import KINDS
from pc_recipe.config.schema import LRScheduler
from pc_recipe.train import spans
from pc_recipe.train.llama2 import Llama2
from pc_recipe.train.optimizers import LRSchedulers, Optimizers, rate_factor


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
    assert heads["split"] and not matrices.get("split")
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


@pytest.mark.parametrize("before, now", [([], ["q", "k"]), (["q"], ["v"]), (["q", "k"], [])])
def test_a_resume_splits_the_weights_that_its_config_says(before, now):
    """A checkpoint is read by the names that the run's own state has, so these must not depend on the split."""
    model, made = _made(muon_heads=before)
    _step(model, made, 0)
    other_model, other = _made(muon_heads=now)
    saved = made.state_dict()
    assert saved.keys() == other.state_dict().keys()
    other.load_state_dict(saved)
    split = [
        name
        for name, p in other_model.named_parameters()
        for g in other._groups()
        if g.get("split")
        for q in g["params"]
        if q is p
    ]
    assert {name.split(".")[-2] for name in split} == {f"w{block}" for block in now}
    assert torch.equal(
        other.state_dict()["state.layers.0.attention.wq.weight.momentum_buffer"],
        saved["state.layers.0.attention.wq.weight.momentum_buffer"],
    )
    _step(other_model, other, 1)


def _step(model, made, seed):
    for index, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + index))
        parameter.grad = drawn.to(parameter)
    made.step()


@pytest.mark.parametrize("name", KINDS)
def test_a_loaded_state_continues_exactly(name):
    """With head-wise Muon, if it is that."""
    settings = {"name": name} | ({} if KINDS[name].splits_heads else {"muon_heads": []})
    model, made = _made(**settings)
    for seed in range(3):
        _step(model, made, seed)
    resumed, other = _made(**settings)
    resumed.load_state_dict(model.state_dict())
    saved = {key: value.clone() if torch.is_tensor(value) else value for key, value in made.state_dict().items()}
    control, without = _made(**settings)
    control.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    for one, optimizers in ((model, made), (resumed, other), (control, without)):
        _step(one, optimizers, 7)
    for key, parameter in model.named_parameters():
        assert torch.equal(resumed.get_parameter(key), parameter), key
        # AdamW's first step is another one; Muon's momentum shows in its matrices
        assert not torch.equal(control.get_parameter(key), parameter), key


def test_a_loaded_schedule_has_the_step_and_the_settings_of_the_config():
    def schedulers(lr: float, steps: int):
        _, made = _made(lr=lr)
        return made, LRSchedulers(made, rate_factor(LRScheduler(warmup_steps=2, decay_ratio=1.0), steps))

    made, saved = schedulers(1e-2, 10)
    for _ in range(6):
        made.step()
        saved.step()
    assert saved.state_dict() == {"muon": {"last_epoch": 6}, "adamw": {"last_epoch": 6}}
    made, resumed = schedulers(1e-3, 20)
    resumed.load_state_dict(saved.state_dict())
    factor = rate_factor(LRScheduler(warmup_steps=2, decay_ratio=1.0), 20)
    assert 0.1 < factor(6) < 0.9 and made.rates() == pytest.approx([1e-3 * factor(6)] * 3)
    made.step()
    resumed.step()
    assert made.rates() == pytest.approx([1e-3 * factor(7)] * 3)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_the_seconds_of_pc_are_those_of_writing_it(monkeypatch, name):
    """By a clock that the optimizers' own steps, and the writing of PC(W), put forward; the trainer adds the pull back."""
    passed = [0.0]
    monkeypatch.setattr(spans, "now", lambda: passed[0])
    config = Config(optimizer={"name": name}).optimizer
    model = pc.attach(Llama2(model_args("nano", vocab_size=64)))
    model.init_weights()
    made = Optimizers([model], config)
    step = made.preconditioner._step
    write = step.write
    monkeypatch.setattr(step, "write", lambda *given: (passed.append(passed.pop() + 0.25), write(*given))[1])
    for optimizer in made.optimizers:
        optimizer.register_step_pre_hook(lambda *_: passed.append(passed.pop() + 4.0))
    model(torch.zeros(1, 8, dtype=torch.long)).square().mean().backward()
    made.preconditioner.pull_back()
    made.step()
    assert passed == [4.0 * len(made.optimizers) + 0.25] and made.pc_times.take() == 0.25


@pytest.mark.parametrize("name", KINDS)
def test_the_memory_estimate_counts_the_states_that_an_optimizer_keeps(name):
    model, made = _made(name=name, muon_heads=[])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    weight = model.layers["0"].attention.wo.weight
    states = [state for state in made.optimizers[0].state[weight].values() if state.shape == weight.shape]
    assert len(states) == KINDS[name].states


def test_a_block_has_its_own_rate_and_an_independent_decay_is_the_same_for_all():
    """With both, weights that start c times as large stay c times as large. The control multiplies the decay by the rate."""
    settings = {"lr": 1e-2, "weight_decay": 1e-3, "independent_decay": True, "lr_factors": {"ffn": 1.8}}
    for options, share in ((settings, 1e-3), (settings | {"independent_decay": False}, 1.8e-2 * 1e-3)):
        model, made = _made(name="AdamW", **options)
        weight = model.layers["0"].feed_forward.w1.weight
        before = weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3e-5)
        made.step()
        moved = before * (1 - share) - 1.8e-2 * 3e-5 / (3e-5 + 1e-8)
        torch.testing.assert_close(weight.detach(), moved, rtol=0, atol=1e-6)  # float32 near 0.05
    other = model.layers["0"].attention.wo.weight
    assert {group["lr"] for optimizer in made.optimizers for group in optimizer.param_groups} == {1e-2, 1e-2 * 1.8}
    assert any(other is p for group in made.optimizers[0].param_groups if group["lr"] == 1e-2 for p in group["params"])


@pytest.mark.parametrize("name, rate", [("AdamW", 1e-2), ("Muon", 1e-2), ("MuonH", 0.05)])
def test_the_rate_that_is_logged_is_that_without_factors(name, rate):
    """Even if every group of the config's optimizer has a factor."""
    factors = {"qk": 0.5, "v": 0.5, "o": 0.5, "ffn": 1.8}
    _, made = _made(name=name, lr=1e-2, hyperball_lr=0.05, lr_factors=factors)
    for optimizer in made.optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25)
    assert made.rate() == pytest.approx(rate / 4)


@pytest.mark.parametrize("name", ["AdamH", "MuonH"])
def test_a_hyperball_rate_of_zero_does_not_divide_the_decay(name):
    _, made = _made(name=name, hyperball_lr=0.0, independent_decay=True)
    assert {(group["lr"], group["weight_decay"]) for group in made.optimizers[0].param_groups} == {(0.0, 0.0)}


@pytest.mark.parametrize("name", ["AdamH", "MuonH"])
def test_hidden_matrices_keep_their_norms_at_a_rate_of_their_own(name):
    settings = {"name": name, "lr": 1e-3, "hyperball_lr": 0.05, "lr_factors": {"o": 2.0}}
    model, made = _made(**settings, muon_heads=[])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for seed, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    made.step()
    for name, parameter in model.named_parameters():
        old, new = before[name], parameter.detach()
        if "layers." in name and "norm" not in name:
            lr = 0.05 * (2.0 if name.endswith("wo.weight") else 1.0)
            # the step is almost orthogonal to the weight, and scaling the sum back shortens it by lr^2 / 2
            torch.testing.assert_close((new - old).norm() / old.norm(), torch.tensor(lr), rtol=0.05, atol=0)
            torch.testing.assert_close(new.norm(), old.norm(), rtol=1e-6, atol=0)
        else:  # AdamW's first step, with its decay
            torch.testing.assert_close(new, old * (1 - 1e-4) - 1e-3 * parameter.grad.sign(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("decay_type", get_args(LRScheduler.model_fields["decay_type"].annotation))
def test_each_decay_falls_from_the_peak_to_the_least_and_stays(decay_type):
    """One that only the schema knows would end a run where its decay begins."""
    schedule = LRScheduler(warmup_steps=5, decay_ratio=0.5, min_lr_factor=0.1, decay_type=decay_type)
    factor = rate_factor(schedule, 1000)
    factors = [factor(step) for step in range(1100)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert factors[5:501] == [1.0] * 496 and factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[999:] == [pytest.approx(0.1, abs=0.002)] * 101  # TorchTitan's last step is one before the least
    assert factors[600] < 0.98


@pytest.mark.parametrize("decaying", [1, 2, 10])
def test_a_linear_decay_ends_one_step_behind_the_last(decaying):
    """So one of a single step changes nothing, and `rules` refuses it."""
    schedule = LRScheduler(warmup_steps=5, decay_ratio=decaying / 100, min_lr_factor=0.1)
    factor = rate_factor(schedule, 100)
    assert [factor(100 - decaying), factor(99)] == pytest.approx([1.0, 1 - 0.9 * (decaying - 1) / decaying])

"""examples/one_file.py computes what the library computes."""

import importlib.util
import re

import pytest
import torch
from torch import nn

import pc
from helpers.tiny import ROOT
from pc.spectral import initial_vectors

FILE = ROOT / "examples" / "one_file.py"


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _model():
    torch.manual_seed(0)
    layers = {"wide": nn.Linear(12, 7, bias=False), "tall": nn.Linear(7, 12, bias=False), "head": nn.Linear(12, 3)}
    return nn.Sequential(*layers.values()).double()


def _losses(model, optimizer, pull_back, write_pc=lambda: None):
    """The losses of five steps of two micro-batches."""
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(5):
        for _ in range(2):
            loss = model(torch.randn(9, 12, generator=generator, dtype=torch.float64)).square().mean()
            loss.backward()
            losses.append(loss.item())
        pull_back()
        optimizer.step()
        optimizer.zero_grad()
        write_pc()
    return losses


def _losses_of_the_library(level):
    model = pc.attach(_model(), pc.PCConfig(level=level, blocks=("[01].*",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    return _losses(model, optimizer, pc.precondition(model, optimizer).pull_back)


def test_ranks_with_seeds_of_their_own_start_alike(one_file):
    """As in scripts that seed each rank by its number, so that it draws its own data."""
    effective = []
    for seed in (1337, 1338):
        model = _model()
        torch.manual_seed(seed)
        one_file.PC([model[0].weight])
        effective.append(model[0].weight)
    assert torch.equal(*effective) and not torch.equal(effective[0], _model()[0].weight)


def test_it_trains_as_the_library_does(one_file):
    """Losses depend on the weights and gammas of all earlier steps."""
    model = _model()
    preconditioner = one_file.PC([model[0].weight, model[1].weight])
    for i, weight in enumerate(preconditioner.weights):  # start from the library's u and v
        u, v = initial_vectors(str(i), weight.shape)
        preconditioner.u[i], preconditioner.v[i] = u.double(), v.double()
    preconditioner.write_pc()
    optimizer = torch.optim.AdamW(preconditioner.trained(model), lr=3e-2)
    losses = _losses(model, optimizer, preconditioner.pull_back, preconditioner.write_pc)
    assert losses == pytest.approx(_losses_of_the_library(4), rel=1e-12)
    assert losses != pytest.approx(_losses_of_the_library(3), rel=1e-3)  # control


def test_weights_that_start_at_zero_or_are_not_used_train_as_in_the_library(one_file):
    def model_with_zeros():
        model = _model()
        nn.init.zeros_(model[1].weight)
        return model

    model, expected = model_with_zeros(), pc.attach(model_with_zeros(), pc.PCConfig(level=4, blocks=("1*",)))
    unused = nn.Parameter(torch.ones(2, 3))
    preconditioner = one_file.PC([unused, model[1].weight])
    optimizer = torch.optim.SGD(preconditioner.trained(model), lr=0.1)
    losses = _losses(model, optimizer, preconditioner.pull_back, preconditioner.write_pc)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    wanted = _losses(expected, optimizer, pc.precondition(expected, optimizer).pull_back)
    assert losses == pytest.approx(wanted, rel=1e-3)  # the initial vectors differ


def test_it_needs_torch_alone_and_learns(one_file, command):
    assert not re.search(r"^(import|from) pc\b", FILE.read_text(), re.MULTILINE)
    assert len(FILE.read_text().splitlines()) <= 150
    status, text, errors = command(str(FILE), str(ROOT / "README.md"), "--steps", 20)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert status == 0 and losses[-1] < losses[0] - 1, errors

"""As CONTRIBUTING says, a metric, an optimizer, a model size and a level are one entry each."""

import json

import pytest
import torch
from torch import Tensor

import pc.polynomial
from helpers import tiny
from helpers.ranks import run_ranks
from pc.errors import UserError
from pc.settings import optimizers
from pc.settings.chain import validated
from pc.settings.models import FLAVORS, Flavor
from pc.settings.schema import Config
from pc.titan import health, memory


class Entries:
    """A contributor's entries in the tables."""

    level = {5: (3.6, -7.0, 6.0, -1.6)}
    flavor = {"slim": Flavor(dim=24, n_layers=1, n_heads=2, multiple_of=8)}

    @staticmethod
    def stable_rank(sigma: Tensor) -> Tensor:
        return sigma.square().sum(-1) / sigma[..., -1].square()

    @staticmethod
    def sgd(parameters, config) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=config.lr, momentum=0.9)

    @classmethod
    def add(cls, set_item) -> None:
        set_item(pc.polynomial.COEFFICIENTS, 5, cls.level[5])
        set_item(FLAVORS, "slim", cls.flavor["slim"])
        set_item(health.SPECTRAL, "stable_rank", cls.stable_rank)
        kind = optimizers.Kind(cls.sgd, states=1)
        set_item(optimizers.KINDS, "SGD", kind)


WORDS = ["--optimizer.name", "SGD", "--model.flavor", "slim", "--pc.level", "5", "--health.spectra_freq", "2"]


def _train(rank, config, overrides):
    Entries.add(lambda table, key, value: table.update({key: value}))
    return tiny.train(rank, config, overrides)


@pytest.mark.parametrize("ranks", [1, 2])
def test_entries_are_all_that_a_run_needs(tiny_config, ranks):
    config, folder = tiny_config
    whole = run_ranks(ranks, _train, config, WORDS)[0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = next(line for line in reversed(lines) if "spectra/stable_rank/layers.0.attention.wo" in line)
    sigma = torch.linalg.svdvals(whole["layers.0.attention.wo.weight"].double())
    # the last step is due; the metric is of the weights after it, in float32
    assert measured["spectra/stable_rank/layers.0.attention.wo"] == pytest.approx(
        float(Entries.stable_rank(sigma.flip(0))), rel=1e-5
    )
    assert "spectra/condition/layers.0.attention.wo" in measured


def test_an_entry_brings_its_checks_and_memory(monkeypatch):
    chosen = {"optimizer": {"name": "SGD"}}
    with pytest.raises(UserError, match="optimizer.name = 'SGD' should be one of AdamW, Muon"):
        validated(chosen, Config, "here")
    Entries.add(monkeypatch.setitem)
    validated(chosen, Config, "here")
    sizes = memory.Sizes(100, 60, 40, 30, 40, 8, 16, 2, 5)
    assert memory.optimizer_elements(sizes, "SGD") == 60 + 2 * 40

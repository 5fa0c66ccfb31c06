"""What optimizers keep of their parameters besides groups and states."""

import pytest
import torch

import pc
from helpers.toy import toy_model
from pc import PCConfig


class Prepared(torch.optim.AdamW):
    """Looks at the names of its groups when they are added."""

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        assert len(group["param_names"]) == len(group["params"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Prepared])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_names_of_parameters_stay_theirs(kind, prefix):
    """Two groups, with names as a compiled model has them; checkpoints by name then hold what they say."""
    model = pc.attach(toy_model(), PCConfig())
    named = [(f"{prefix}{name}", p) for name, p in model.named_parameters()]
    optimizer = kind([{"params": named[:5]}, {"params": named[5:]}], lr=1e-2)
    given = [[*group["param_names"]] for group in optimizer.param_groups]
    preconditioner = pc.precondition(model, optimizer)
    expected = {f"{prefix}{name}": p for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert expected[name] is p
    preconditioner.leave()
    assert [group["param_names"] for group in optimizer.param_groups] == given


def test_names_of_an_optimizer_that_was_made_later():
    model = pc.attach(toy_model(), PCConfig())
    preconditioner = pc.precondition(model)
    optimizer = torch.optim.AdamW(model.named_parameters())
    preconditioner.follow(optimizer)
    (group,) = optimizer.param_groups
    expected = dict(model.named_parameters())
    assert all(expected[name] is p for name, p in zip(group["param_names"], group["params"], strict=True))

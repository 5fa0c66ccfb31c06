"""Calls that are forgotten or in a wrong order, and changes of PC(W): what would go wrong in silence raises one line."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn

import pc
from helpers.ranks import run_ranks
from helpers.toy import Loop, same, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError


def require_refused(said, action):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        action()
    assert len(str(raised.value).splitlines()) == 1


CHANGED = "was changed while it held PC(W)"
NOT_PULLED_BACK = "without preconditioner.pull_back() since the last backward()"

CALLS = {
    "no pull_back": ("backward step", NOT_PULLED_BACK),
    "a backward pass after pull_back": ("backward pull_back backward step", NOT_PULLED_BACK),
    "pull_back per micro-batch": ("backward pull_back backward pull_back", "already those of W"),
    "no zero_grad": ("backward pull_back step backward pull_back", "optimizer.zero_grad() before the next backward()"),
    "pull_back before backward": ("pull_back", "found no gradient of a weight with PC; call it after backward()"),
}
CALLS_BY_HAND = {
    "no pull_back by hand": ("write_pc backward restore_raw", NOT_PULLED_BACK),
    "pull_back while raw": ("pull_back", "pull_back() while the weights hold W"),
}


@pytest.mark.parametrize(
    "follow, calls, said",
    [(follow, *case) for follow, table in ((True, CALLS), (False, CALLS_BY_HAND)) for case in table.values()],
    ids=[*CALLS, *CALLS_BY_HAND],
)
def test_calls_in_a_wrong_order_are_said(follow, calls, said):
    *before, wrong = calls.split()
    loop = Loop(follow=follow).call(*before)
    require_refused(said, lambda: loop.call(wrong))


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: (loop.backward(), torch.optim.SGD(loop.model.parameters(), lr=0.1).step()),
        lambda loop: loop.model.load_state_dict(Loop(seed=1).model.state_dict()),
        lambda loop: [parameter.detach().mul_(0.999) for parameter in loop.model.parameters()],
        lambda loop: nn.init.normal_(loop.model[1].feed_forward["w2"].weight),
    ],
    ids=["another optimizer", "model loaded without the preconditioner", "averaged weights not swapped back",
         "weights initialised late"],
)  # fmt: skip
def test_a_change_of_pc_is_said(change):
    loop = Loop()
    change(loop)
    require_refused(CHANGED, loop.step)


@pytest.mark.parametrize("before, call", [("", "pull_back"), ("restore_raw", "write_pc")])
def test_a_model_that_moves_after_precondition_is_said(before, call):
    loop = Loop().call(*before.split())
    loop.model.float()
    said = (
        "0.attention.wo is torch.float32 on cpu now, and was torch.float64 on cpu: call pc.precondition after model.to("
    )
    require_refused(said, lambda: loop.call(call))


def attached(**settings):
    return pc.attach(toy_model(), PCConfig(**settings))


def second_preconditioner():
    loop = Loop()
    pc.precondition(loop.model, loop.optimizer)


def two_dtypes():
    model = toy_model()
    model[1].float()
    pc.precondition(pc.attach(model, PCConfig()))


def two_modes():
    model = toy_model()
    for name, block, mode in zip("ab", model, ("step", "forward"), strict=True):
        pc.attach(nn.ModuleDict({name: block}), PCConfig(mode=mode))
    pc.precondition(model)


def weights_tied_after_attach():
    model = attached()
    model[1].attention["wo"].weight = model[0].attention["wo"].weight
    pc.precondition(model)


MISTAKES = {
    "no preconditioner": (
        lambda: attached()(toy_batch(0)),
        "there is no PC(W) of 0.attention.wo: it has no preconditioner; call pc.precondition(model, optimizer)",
    ),
    "preconditioner without attach": (lambda: pc.precondition(toy_model()), "no weight with PC; call pc.attach"),
    "preconditioner on the meta device": (
        lambda: pc.precondition(pc.attach(toy_model().to("meta"), PCConfig())),
        "on the meta device; call pc.precondition once the weights exist",
    ),
    "second preconditioner": (second_preconditioner, "has a preconditioner already"),
    "preconditioner of a copy": (
        lambda: pc.precondition(copy.deepcopy(Loop().model)),
        "copy.deepcopy((model, optimizer, preconditioner))",
    ),
    "two models": (lambda: pc.precondition([attached(), attached()]), "two modules have PC of the name 0.attention.wo"),
    "weights tied after attach": (weights_tied_after_attach, "shares its weight: 0.attention.wo, 1.attention.wo"),
    "weights of two dtypes": (
        two_dtypes,
        "0.attention.wo is torch.float64, 1.attention.wo torch.float32; give weights",
    ),
    "weights of two modes": (
        two_modes,
        'a.attention.wo has pc.mode "step", b.attention.wo "forward"; use one for all',
    ),
    "weights in half precision": (
        lambda: pc.precondition(pc.attach(toy_model().bfloat16(), PCConfig())),
        "W needs float32",
    ),
    "state without gammas": (
        lambda: Loop().preconditioner.load_state_dict(Loop(learnable_gamma=False).preconditioner.state_dict()),
        "gamma: nothing; the model has shape [1]: make it with the PCConfig",
    ),
    "merge without a preconditioner": (
        lambda: pc.merge(attached()),
        "there is no PC(W) of 0.attention.wo: it has no preconditioner",
    ),
}


@pytest.mark.parametrize("mistake, said", MISTAKES.values(), ids=MISTAKES)
def test_what_would_go_wrong_in_silence_is_said(mistake, said):
    require_refused(said, mistake)


@pytest.mark.parametrize("follow", [True, False])
def test_no_subset_of_calls_trains_a_plain_model(follow):
    """Three rounds of a loop without any subset of its calls raise an error, give the result of the complete loop, or
    leave W unchanged."""
    whole = (
        ("backward", "pull_back", "step") if follow else ("backward", "pull_back", "restore_raw", "step", "write_pc")
    )

    def train(first, calls):
        loop = Loop(follow=follow, make=lambda p: torch.optim.SGD(p, lr=0.1))
        if first and not follow:
            loop.preconditioner.write_pc()
        for _ in range(3):
            loop.call(*calls)
            loop.optimizer.zero_grad()
        loop.preconditioner.state_dict()
        return loop.raw()

    expected, start = train(True, whole), Loop(follow=False).raw()
    outcomes = set()
    for first in (True, False):
        for kept in itertools.product((True, False), repeat=len(whole)):
            calls = tuple(itertools.compress(whole, kept))
            if "backward" not in calls:
                continue
            try:
                result = train(first, calls)
            except UserError:
                outcomes.add("refused")
                continue
            assert same(result, start) or same(result, expected), (first, calls)
            outcomes.add("unmoved" if same(result, start) else "equal")
    assert outcomes == {"refused", "unmoved", "equal"}


def test_a_first_step_of_lr_0_is_a_step():
    """As in a warm-up from zero: weights stay, vectors advance, and a forgotten pull-back is reported."""
    loop = Loop(make=lambda p: torch.optim.AdamW(p, lr=0.0))
    loop.backward()
    require_refused("without preconditioner.pull_back()", loop.optimizer.step)
    loop.optimizer.zero_grad()
    u = loop.preconditioner.weights["0.attention.wo"].u.clone()
    loop.step()
    assert not torch.equal(loop.preconditioner.weights["0.attention.wo"].u, u)


def _ddp(rank):
    """What a step under DDP says on a rank whose weights were another's, if the preconditioner was made before DDP."""
    model = pc.attach(toy_model(seed=rank), PCConfig())
    made = pc.precondition(model, torch.optim.SGD(model.parameters(), lr=0.1))
    nn.parallel.DistributedDataParallel(model)  # copies rank 0's PC(W) over that of rank 1
    toy_loss(model, toy_batch(0)).backward()
    try:
        made.pull_back()
    except UserError as error:
        return str(error)


def test_ddp_after_the_preconditioner_is_said():
    first, second = run_ranks(2, _ddp)
    assert first is None and CHANGED in second


def test_steps_in_the_backward_pass_are_refused():
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = pc.attach(toy_model(), PCConfig())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    pc.precondition(model, *optimizers.values())
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    require_refused(NOT_PULLED_BACK, toy_loss(model, toy_batch(0)).backward)


def test_an_optimizer_that_changes_weights_after_its_step_is_refused():
    """As Lookahead does in a class of its own: PC(W) is written before."""

    class Lookahead(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.9)

    loop = Loop(make=lambda p: Lookahead(p, lr=0.1))
    loop.step()
    loop.backward(1)
    require_refused(CHANGED, loop.preconditioner.pull_back)

"""Forgotten calls, calls in a wrong order, and changes of PC(W): what would silently go wrong is a one-line error."""

import copy
import gc
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, spectral_norm, weight_norm
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

import pc
from helpers.toy import Loop, require_pc, same, toy_batch, toy_loss, toy_model
from pc import PCConfig, UserError

pytestmark = pytest.mark.fast


def require_refused(said, action):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        action()
    assert len(str(raised.value).splitlines()) == 1


CHANGED = (
    "was changed while it held PC(W), and optimizers train W: change weight_orig and call preconditioner.write_pc()"
)
NOT_PULLED_BACK = "which turns them into those of W, was not called after the last backward()"
NO_GRADIENT = "found no gradient of a weight with PC; call it after backward()"
STALE = (
    "call preconditioner.write_pc() before the forward pass; for an optimizer made later, "
    "call preconditioner.follow(optimizer)"
)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def plain_sgd_step(loop):
    """A step of an optimizer that the preconditioner does not follow."""
    loop.backward()
    sgd(loop.model.parameters()).step()


CALLS = {
    "no pull_back": (True, "backward step", NOT_PULLED_BACK),
    "a backward pass after pull_back": (True, "backward pull_back backward step", NOT_PULLED_BACK),
    "pull_back before backward": (True, "pull_back", NO_GRADIENT),
    "no pull_back by hand": (False, "backward step", NOT_PULLED_BACK),
    "no write_pc by hand": (False, "backward pull_back step backward pull_back", STALE),
}


@pytest.mark.parametrize("follow, calls, said", CALLS.values(), ids=CALLS)
def test_calls_in_a_wrong_order_are_refused(follow, calls, said):
    *before, wrong = calls.split()
    loop = Loop(sgd, follow=follow).call(*before)
    require_refused(said, lambda: loop.call(wrong))


def test_clipping_what_was_not_pulled_back_is_refused():
    """Only the optimizer's own state may be asked for between micro-batches."""
    loop = Loop(sgd).call("backward")
    loop.optimizer.state_dict()
    require_refused(NOT_PULLED_BACK, lambda: nn.utils.clip_grad_norm_(loop.optimizer.param_groups[0]["params"], 1.0))


def test_pull_back_twice_pulls_back_once():
    loop, other = Loop(sgd), Loop(sgd)
    loop.call("backward", "pull_back")
    require_refused(NO_GRADIENT, loop.pull_back)
    loop.update()
    other.step()
    assert same(loop.model.state_dict(), other.model.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        plain_sgd_step,
        lambda loop: [parameter.detach().mul_(0.999) for parameter in loop.model.parameters()],
        lambda loop: nn.init.normal_(loop.model[1].feed_forward["w2"].weight),
    ],
    ids=["another optimizer", "averaged weights not swapped back", "weights initialised late"],
)
@pytest.mark.parametrize("then", ["pull_back", "write_pc", "step"])
def test_a_change_of_pc_is_refused(change, then):
    loop = Loop(sgd)
    change(loop)
    require_refused(CHANGED, lambda: loop.call("backward", then) if then == "pull_back" else loop.call(then))


def normalise(weight):
    weight.data.copy_(nn.functional.normalize(weight.data, dim=1))


def replace(weight):
    weight.data = weight.data * 0.9


@pytest.mark.parametrize("change", [normalise, replace])
def test_a_change_of_pc_through_data_is_refused(change):
    """By its values, as of W: `.data` has version counters of its own. It would be gone after one step."""
    loop = Loop(sgd)
    loop.step()
    change(loop.model[1].feed_forward["w2"].weight)
    loop.backward()
    require_refused(f"1.feed_forward.w2 {CHANGED}", loop.pull_back)


@pytest.mark.parametrize("w_of, pc_of", [(0, 1), (1, 0)])
def test_a_change_of_pc_is_refused_beside_a_change_of_w(w_of, pc_of):
    loop = Loop(sgd)
    with torch.no_grad():
        loop.model[w_of].attention["wo"].weight_orig.mul_(2.0)
        loop.model[pc_of].attention["wo"].weight.mul_(2.0)
    require_refused(CHANGED, loop.preconditioner.write_pc)


@pytest.mark.parametrize(
    "changed, said",
    [
        ("weight_orig", STALE),
        ("weight_gamma", STALE),
        ("weight_u", "u or v was changed"),
        ("weight_v", "u or v was changed"),
    ],
)
def test_a_change_of_what_pc_is_computed_from(changed, said):
    """Pull-back is refused until PC(W) is written, so that gradients belong to the weights that forward passes used."""
    loop = Loop(sgd)
    with torch.no_grad():
        vector = getattr(loop.model[0].attention["wo"], changed)
        vector.copy_(vector.roll(1)) if said != STALE else vector.mul_(2.0)
    loop.backward()
    require_refused(said, loop.pull_back)
    loop.zero_grad()
    loop.preconditioner.write_pc()
    require_pc(loop.preconditioner)
    loop.step()


def test_averages_of_the_parameters_that_were_swapped_back():
    """u and v, which are buffers, were left alone, so they do not tell of a load."""
    loop, other = Loop(sgd), Loop(sgd)
    for parameter in loop.model.parameters():
        before = parameter.detach().clone()
        parameter.detach().mul_(0.9)
        parameter.detach().copy_(before)
    loop.backward()
    require_refused(CHANGED, loop.pull_back)
    loop.preconditioner.note_loaded()
    loop.pull_back()
    loop.update()
    other.step()
    assert same(loop.model.state_dict(), other.model.state_dict())


def test_a_gamma_that_is_taken_out():
    """As one that was changed."""
    loop = Loop(sgd)
    loop.model[0].attention["wo"].weight_gamma = None
    loop.backward()
    require_refused(STALE, loop.pull_back)
    loop.zero_grad()
    loop.preconditioner.write_pc()
    loop.step()


def test_a_weight_that_has_given_its_place_away():
    """Another parameter has the gradient, which would be missing in silence."""
    loop = Loop(sgd)
    layer = loop.model[0].attention["wo"]
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    loop.backward()
    require_refused("has another weight than pc.precondition found", loop.pull_back)


# torch's functions that replace a weight by other parameters, some under the names that PC uses
TAKEN = {
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "spectral_norm": spectral_norm,
    "weight_norm": weight_norm,
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("change", TAKEN.values(), ids=TAKEN)
def test_weights_that_are_computed_from_others_are_refused(change, when):
    model = toy_model()

    def apply():
        change(model[0].attention["wo"])

    def train():
        if when == "before":
            apply()
        pc.attach(model, PCConfig(blocks=("*.wo",)))
        if when == "between":
            apply()
        optimizer = sgd(model.parameters())
        preconditioner = pc.precondition(model, optimizer)
        if when == "after":
            apply()
        toy_loss(model, toy_batch(0)).backward()
        preconditioner.pull_back()
        optimizer.step()

    # the older weight_norm itself refuses names that are taken
    said = r"0\.attention\.wo\b.*prune, spectral_norm or weight_norm|attribute 'weight_v' already exists"
    with pytest.raises((UserError, KeyError), match=said):
        train()
    if when == "before":
        rest = pc.attach(model, PCConfig(blocks=("1.*.wo",)))
        assert [name for name, _ in pc.named_weights(rest)] == ["1.attention.wo"]


def attached(**settings):
    return pc.attach(toy_model(), PCConfig(**settings))


def second_preconditioner():
    loop = Loop()
    pc.precondition(loop.model, loop.optimizer)


def two_dtypes():
    model = toy_model()
    model[1].float()
    pc.precondition(pc.attach(model, PCConfig()))


def weights_tied_after_attach():
    model = attached()
    model[1].attention["wo"].weight = model[0].attention["wo"].weight
    pc.precondition(model)


def parameter_assigned():
    loop = Loop()
    loop.model.load_state_dict(copy.deepcopy(loop.model.state_dict()), assign=True)
    loop.step()


def replaced_layer(keeps_its_parameter):
    """Replace a layer, as conversions to float8 do, which keep the parameter."""

    def mistake():
        loop = Loop()
        old = loop.model[0].attention.wo
        loop.model[0].attention.wo = nn.Linear(old.in_features, old.out_features, bias=False).to(old.weight.dtype)
        if keeps_its_parameter:
            loop.model[0].attention.wo.weight = old.weight
        loop.step()

    return mistake


def unfrozen_by_an_earlier_list():
    model = attached()
    parameters = [p.requires_grad_(False) for p in model[0].parameters()]
    preconditioner = pc.precondition(model, sgd(model.parameters()))
    for parameter in parameters:
        parameter.requires_grad_()
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()


def unfrozen_without_its_gamma():
    """The optimizer gets W, perhaps by its two dimensions. Gamma would stay 1, and its gradient would add up for ever."""
    model = attached()
    model[0].requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    preconditioner = pc.precondition(model, optimizer)
    model[0].requires_grad_()
    optimizer.add_param_group({"params": [p for p in model[0].parameters() if p.ndim > 1]})
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()


def by_names(split):
    """Optimizers made after `pc.precondition`; `split(weights, rest)` gives the parameters of each."""
    preconditioner = pc.precondition(model := attached())
    named = dict(model.named_parameters())
    weights, rest = ([named[name] for name in named if name.endswith("weight") is which] for which in (True, False))
    preconditioner.follow(*map(sgd, split(weights, rest)))


IN_TWO_PLACES = "0.attention.wo: weight and weight_orig are in different parameter groups"

MISTAKES = {
    "unfrozen by an earlier list": (
        unfrozen_by_an_earlier_list,
        "0.attention.wo has gradients, but its W and gamma are frozen",
    ),
    "unfrozen without its gamma": (
        unfrozen_without_its_gamma,
        "0.attention.wo was unfrozen; call preconditioner.follow",
    ),
    "PC(W) and W in two groups": (
        lambda: by_names(lambda weights, rest: [[{"params": weights}, {"params": rest}]]),
        IN_TWO_PLACES,
    ),
    "PC(W) and W in two optimizers": (lambda: by_names(lambda weights, rest: [weights, rest]), IN_TWO_PLACES),
    "no preconditioner": (
        lambda: attached()(toy_batch(0)),
        "there is no PC(W) of 0.attention.wo: it has no preconditioner; call pc.precondition(model, optimizer)",
    ),
    "preserved, and no preconditioner": (
        lambda: (pc.preserve(model := attached()), model(toy_batch(0))),
        "it has no preconditioner",
    ),
    "preconditioner without attach": (lambda: pc.precondition(toy_model()), "no weight with PC; call pc.attach"),
    "preconditioner on the meta device": (
        lambda: pc.precondition(pc.attach(toy_model().to("meta"), PCConfig())),
        "on the meta device; call pc.precondition once the weights exist",
    ),
    "second preconditioner": (second_preconditioner, "has a preconditioner already"),
    "two models": (
        lambda: pc.precondition([attached(), attached()]),
        "two modules with PC have the name 0.attention.wo: call pc.attach on one module that holds both",
    ),
    "weights tied after attach": (weights_tied_after_attach, "shares its weight: 0.attention.wo, 1.attention.wo"),
    "weights assigned": (parameter_assigned, "0.attention.wo has another weight than pc.precondition found"),
    "a layer replaced": (replaced_layer(keeps_its_parameter=False), "0.attention.wo is not in the model any more"),
    "a layer replaced by one with its parameter": (
        replaced_layer(keeps_its_parameter=True),
        "0.attention.wo is not in the model any more",
    ),
    "weights of two dtypes": (
        two_dtypes,
        "0.attention.wo is torch.float64, 1.attention.wo torch.float32; give weights",
    ),
    "weights in half precision": (
        lambda: pc.precondition(pc.attach(toy_model().bfloat16(), PCConfig())),
        "W needs float32",
    ),
    "complex weights": (
        lambda: pc.precondition(pc.attach(toy_model().to(torch.complex64), PCConfig())),
        "0.attention.wo is torch.complex64, but W needs float32",
    ),
}


@pytest.mark.parametrize("mistake, said", MISTAKES.values(), ids=MISTAKES)
def test_what_would_go_wrong_in_silence_is_said(mistake, said):
    require_refused(said, mistake)


@pytest.mark.parametrize("follow", [True, False])
def test_no_subset_of_calls_trains_a_plain_model(follow):
    """Whichever calls are left out, three rounds of a loop raise an error, give the result of the complete loop (or of one
    whose gradients add up), or leave W unchanged; and the model computes with PC(W)."""
    whole = ("backward", "pull_back", "step", "zero_grad") + (() if follow else ("write_pc",))

    def train(calls):
        loop = Loop(sgd, follow=follow)
        for _ in range(3):
            for call in calls:
                loop.zero_grad() if call == "zero_grad" else loop.call(call)
        require_pc(loop.preconditioner)
        return loop.trained()

    expected, start = train(whole), Loop().trained()
    summed = train(tuple(call for call in whole if call != "zero_grad"))  # as in a plain loop, gradients add up
    outcomes = set()
    for kept in itertools.product((True, False), repeat=len(whole)):
        calls = tuple(itertools.compress(whole, kept))
        try:
            result = train(calls)
        except UserError:
            outcomes.add("refused")
            continue
        found = {"unmoved": same(result, start), "equal": same(result, expected), "added up": same(result, summed)}
        assert any(found.values()), calls
        outcomes.add(next(name for name, is_so in found.items() if is_so))
    assert outcomes == {"refused", "unmoved", "equal", "added up"}


@pytest.mark.parametrize("call", ["pull_back", "write_pc", "restart", "follow"])
def test_a_preconditioner_of_a_model_without_pc_is_refused(call):
    loop = Loop(sgd)
    loop.step()
    pc.merge(loop.model)
    arguments = [loop.optimizer] if call == "follow" else []
    said = "pc.merge or pc.detach has removed PC from the model of this preconditioner"
    require_refused(said, lambda: getattr(loop.preconditioner, call)(*arguments))
    pc.precondition(pc.attach(loop.model), loop.optimizer)
    require_refused(said, lambda: getattr(loop.preconditioner, call)(*arguments))


@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_an_optimizer_that_was_not_given_and_has_no_w_is_refused(make):
    """An optimizer made before `pc.precondition` would train all parameters but W."""
    model = attached()
    optimizer = make(model.parameters())
    preconditioner = pc.precondition(model)
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()
    said = "was made before pc.precondition and does not have W; call preconditioner.follow(optimizer)"
    require_refused(said, optimizer.step)
    preconditioner.follow(optimizer)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert not torch.equal(before["0.attention.wo.weight_orig"], model.state_dict()["0.attention.wo.weight_orig"])


def test_only_optimizers_with_weights_of_a_live_preconditioner_are_looked_at():
    model = attached()
    early = sgd(model.parameters())
    preconditioner = pc.precondition(model)
    toy_loss(model, toy_batch(0)).backward()
    preconditioner.pull_back()
    sgd(toy_model().parameters()).step()
    late = sgd(model.parameters())  # has both PC(W) and W
    late.step()
    pc.merge(model)
    early.step()
    gc.collect()  # frees preconditioners that other tests have left
    made = len(hooks)
    del preconditioner
    preconditioner = pc.precondition(attached())
    assert len(hooks) == made + 1
    del preconditioner
    assert len(hooks) == made


def test_a_first_step_of_lr_0_needs_pull_back():
    """As in a warm-up from zero."""
    loop = Loop(lambda p: torch.optim.AdamW(p, lr=0.0))
    loop.backward()
    require_refused(NOT_PULLED_BACK, loop.optimizer.step)


def test_steps_in_the_backward_pass_are_refused():
    """Each parameter has an optimizer, which steps as soon as its gradient exists."""
    model = attached()
    optimizers = {p: sgd([p]) for p in model.parameters()}
    pc.precondition(model, *optimizers.values())
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(lambda _, step=optimizer.step: step())
    require_refused(NOT_PULLED_BACK, toy_loss(model, toy_batch(0)).backward)


def test_gradients_with_a_graph_are_refused():
    """As AdaHessian and Sophia differentiate again."""
    loop = Loop(sgd)
    toy_loss(loop.model, toy_batch(0)).backward(create_graph=True)
    require_refused(
        "0.attention.wo has a graph, by backward(create_graph=True), but that of W can have none", loop.pull_back
    )

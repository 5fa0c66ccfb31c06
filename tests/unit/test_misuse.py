"""Loops that do something unusual with PC layers: the result is right, or one line says what is wrong."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

import pc
from helpers.ranks import run_ranks
from helpers.toy import toy_batch, toy_loss, toy_model
from pc import PCConfig, StepSchedule, UserError
from pc.linear import effective_weight

BOTH = ("0*", "2*")


def net(schedule="step", seed=0, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).double()
    return pc.attach(model, PCConfig(blocks=BOTH, schedule=schedule, **settings))


def batch(index=0, dtype=torch.float64):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(index), dtype=dtype)


def loss(model, index=0):
    return (model(batch(index, model[0].weight.dtype)) - 1).square().mean()


def started(**settings):
    model = net(**settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, StepSchedule(model, optimizer)


def require_refused(said, action):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        action()
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("with_pull_back", [True, False])
@pytest.mark.parametrize("follow", [True, False])
def test_a_closure_is_refused_in_schedule_step(with_pull_back, follow):
    """It computes gradients within the step, when the weights hold W; the optimizer would train PC(W)."""
    model, optimizer, schedule = started()
    if not follow:
        schedule._follows = False

    def closure():
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        if with_pull_back:
            schedule.pull_back()
        return value

    said = "SGD.step(closure) computes gradients" if follow else "SGD.step() would train PC(W) of 0"
    require_refused(said, lambda: optimizer.step(closure))
    require_refused(said, lambda: optimizer.step(closure=closure))
    assert optimizer.step(None) is None


def test_a_closure_works_in_schedule_forward():
    models = [net("forward"), net("forward")]
    for i, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            return value

        for _ in range(3):
            if i:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("learnable_gamma", [True, False])
def test_gradients_of_w_and_of_pc_are_never_mixed(learnable_gamma):
    model, optimizer, schedule = started(learnable_gamma=learnable_gamma)

    def no_zero_grad():
        for _ in range(2):
            loss(model).backward()
            schedule.pull_back()
            optimizer.step()

    require_refused("already those of W", no_zero_grad)
    optimizer.zero_grad()

    def backward_after_pull_back():
        loss(model).backward()
        schedule.pull_back()
        loss(model, 1).backward()
        optimizer.step()

    require_refused("without schedule.pull_back() since the last backward()", backward_after_pull_back)
    optimizer.zero_grad()

    def pull_back_forgotten_after_a_skipped_step():
        loss(model).backward()
        schedule.pull_back()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    require_refused("without schedule.pull_back() since the last backward()", pull_back_forgotten_after_a_skipped_step)
    optimizer.zero_grad()
    raw = schedule.layers["0"].raw.clone()
    loss(model).backward()
    schedule.pull_back()
    optimizer.step()
    assert not torch.equal(schedule.layers["0"].raw, raw)  # control: the usual loop goes on


def test_gradients_that_are_zeroed_instead_of_dropped():
    models = [started(), started()]
    for in_place, (model, optimizer, schedule) in enumerate(models):
        for index in range(4):
            loss(model, index).backward()
            schedule.pull_back()
            if index != 1:  # a skipped step
                optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
    for one, other in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_loss_of_gamma_is_refused_in_schedule_step():
    model, _, schedule = started()
    (loss(model) + model[0].gamma.square().sum()).backward()
    require_refused("a loss that contains a gamma itself", schedule.pull_back)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("make, pattern", [(Attention, "*.out_proj"), (encoder, "*.linear1")])
def test_modules_that_read_the_weight_are_refused_in_schedule_forward(make, pattern):
    require_refused('schedule="step"', lambda: pc.attach(make(), PCConfig(blocks=(pattern,))))
    torch.manual_seed(0)
    model, x = make(), torch.randn(2, 5, 16)
    before = model(x)
    pc.attach(model, PCConfig(blocks=(pattern,), schedule="step"))
    StepSchedule(model).materialise()
    outputs = model(x), model.eval()(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), outputs[0], rtol=1e-4, atol=1e-5)  # torch's fast path
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert (outputs[0] - before).norm() > 1e-2 * before.norm()
    torch.testing.assert_close(pc.merge(model)(x), outputs[0], rtol=1e-4, atol=1e-5)
    pickle.loads(pickle.dumps(model))


def test_a_weight_used_without_its_layer_is_noticed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.layers = [self.a]  # a plain list keeps the layer without PC

        def forward(self, x):
            return self.layers[0](x)

    model = pc.attach(Model(), PCConfig(blocks=("a*",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 16)).sum().backward()
    require_refused("a.weight has a gradient and a.gamma has none", optimizer.step)


def test_weights_changed_in_place():
    model = net("forward")
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(3)))
    unseen = effective_weight(model[0].weight, model[0].gamma, model[0].u, model[0].v, model[0].pc_config)
    model(batch())
    seen = effective_weight(model[0].weight, model[0].gamma, model[0].u, model[0].v, model[0].pc_config)
    norm = torch.linalg.matrix_norm(model[0].weight, 2)
    assert torch.linalg.matrix_norm(seen, 2) < 1.1 * norm < torch.linalg.matrix_norm(unseen, 2)

    model, optimizer, schedule = started()
    loss(model).backward()
    schedule.pull_back()
    with torch.no_grad():
        kept = model[0].weight.clone()
        model[0].weight.clamp_(-0.01, 0.01)  # weight clipping
        require_refused("0.weight was changed while it held PC(W)", optimizer.step)
        model[0].weight.copy_(kept)  # a moving average swapped in and out
    optimizer.step()


def test_parameters_replaced_or_converted_later_are_refused():
    for change, said in (
        (lambda model: model.float(), "0.weight moved from torch.float64 on cpu to torch.float32"),
        (lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight.clone())), "0.weight was replaced"),
    ):
        model, _, schedule = started()
        change(model)
        loss(model).backward()
        require_refused(said, schedule.pull_back)


def test_weights_tied_after_attach_are_refused():
    model = pc.attach(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), PCConfig(blocks=("0*", "1*"), schedule="step"))
    model[1].weight = model[0].weight
    require_refused("0.weight is shared with 1", lambda: StepSchedule(model))


class Scaled(nn.Linear):
    """A subclass with its own parameter and forward pass, as adapters have."""

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.full((), 3.0))

    def forward(self, x):
        return self.scale * super().forward(x)


def test_merge_keeps_what_the_layer_was():
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda layer, inputs, output: output + 1)
    pc.attach(model, PCConfig(blocks=("0*", "1*"), schedule="step"))
    StepSchedule(model).materialise()
    for other in (copy.deepcopy(model), model):
        expected = other(torch.ones(2, 8))
        merged = pc.merge(other)
        assert type(merged[0]) is Scaled and type(merged[1]) is nn.Linear
        assert set(dict(merged.named_parameters())) == {"0.weight", "0.bias", "0.scale", "1.weight", "1.bias"}
        assert vars(merged[1]).keys() == vars(nn.Linear(8, 8)).keys()
        assert torch.equal(merged(torch.ones(2, 8)), expected)


@pytest.mark.parametrize("schedule", ["forward", "step"])
def test_autocast_does_not_lower_the_precision_of_pc(schedule):
    """A product in bfloat16 would change PC(W) by 1e-2; the weight is rounded to bfloat16 only for the layer's matmul."""
    plain, lowered = net(schedule).float(), net(schedule).float()
    weights, gradients = [], []
    for model, enabled in ((plain, False), (lowered, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = StepSchedule(model) if schedule == "step" else None
            if made:
                made.materialise()
                weights.append(model[0].weight.detach().clone())
                (model[0].weight * torch.linspace(-1, 1, 16)).sum().backward()
                model[2].weight.grad = torch.ones_like(model[2].weight)
                made.pull_back()
                gradients.append(model[0].weight.grad)
            else:
                layer = model[0]
                layer.refresh()
                weight = effective_weight(layer.weight, layer.gamma, layer.u, layer.v, layer.pc_config)
                weights.append(weight.detach())
        if schedule == "forward":  # torch wants backward passes outside of autocast
            gradients.append(torch.autograd.grad((weight * torch.linspace(-1, 1, 16)).sum(), layer.weight)[0])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_a_layer_that_a_step_does_not_use_stays():
    model, optimizer, schedule = started()
    raw = schedule.layers["2"].raw.clone()
    model[0](batch()).square().mean().backward()
    schedule.pull_back()
    optimizer.step()
    assert torch.equal(schedule.layers["2"].raw, raw)
    assert not torch.equal(schedule.layers["0"].raw, net()[0].weight)


def test_plain_weights_assigned_to_a_model_on_the_meta_device():
    for schedule in ("forward", "step"):
        reference = net(schedule)
        with torch.device("meta"):
            model = net(schedule)
        plain = {k: v.detach().clone() for k, v in reference.state_dict().items() if k.endswith(("weight", "bias"))}
        model.load_state_dict(plain, strict=False, assign=True)
        for one in (model, reference):
            if schedule == "step":
                StepSchedule(one).materialise()
        torch.testing.assert_close(model(batch()), reference(batch()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: pc.attach(nn.Linear(4, 4), PCConfig(blocks=("*",))), "the model itself is the layer"),
        (lambda: pc.attach(nn.Sequential(nn.LazyLinear(4)), PCConfig(blocks=("0*",))), "has no weight of its own yet"),
        (
            lambda: pc.attach(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))), PCConfig(blocks=("0*",))),
            "has no weight of its own yet",
        ),
        (lambda: StepSchedule([net(), net(seed=1)]), "two models have a PC layer 0"),
        (
            lambda: started()[2].load_state_dict(
                {name: {k: v[:1] for k, v in s.items()} for name, s in started()[2].state_dict().items()}
            ),
            "PC state of 0: raw has shape [1, 16], not [32, 16]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_what_cannot_work_is_refused_in_a_line(make, said):
    require_refused(said, make)


def test_a_refused_preserve_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4))
    config = PCConfig(blocks=("0*",), norm_recovery=False)
    for _ in range(2):
        require_refused("needs pc.norm_recovery = true", lambda: pc.attach(model, config, preserve=True))
    assert type(model[0]) is nn.Linear


def _ddp(rank, wrap):
    """Parameters after three steps, or the error."""
    made = {
        "plain": lambda model: nn.parallel.DistributedDataParallel(model),
        "compiled": lambda model: nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")),
        "wrapped": lambda model: nn.parallel.DistributedDataParallel(nn.ModuleList([model])),
    }
    try:
        model = net(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrap == "later":
            schedule = StepSchedule(model, optimizer)
            wrapped = made["plain"](model)
        else:
            wrapped = made[wrap](model)
            schedule = StepSchedule(wrapped, optimizer)
        if rank and wrap != "plain":
            schedule.restore_raw()
            return "accepted"
        for index in range(3):
            if wrap == "plain":
                (wrapped(batch(10 * index + rank)) - 1).square().mean().backward()
                schedule.pull_back()
                optimizer.step()
                optimizer.zero_grad()
    except UserError as error:
        return str(error)
    return model[0].weight.detach().clone()


@pytest.mark.parametrize(
    "wrap, said",
    [
        ("plain", None),
        ("later", "create pc.StepSchedule after initialisation and DDP"),
        ("compiled", "call pc.attach on the module that DDP wraps (torch.compile after DDP)"),
        ("wrapped", "call pc.attach on the module that DDP wraps"),
    ],
)
def test_ddp_in_another_order(wrap, said):
    results = run_ranks(2, _ddp, wrap)
    if said is None:
        assert torch.equal(*results)
    else:
        assert said in results[1]


def test_the_gradients_of_a_usual_loop_are_those_of_schedule_forward():
    """A control for the checks above: accumulation and clipping, with a backward pass for each micro-batch."""
    for schedule in ("forward", "step"):
        model = pc.attach(toy_model(), PCConfig(schedule=schedule))
        made = StepSchedule(model) if schedule == "step" else None
        if made:
            made.materialise()
        for index in range(3):
            toy_loss(model, toy_batch(index)).backward()
        if made:
            made.pull_back()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        if schedule == "forward":
            expected = gradients
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-9)

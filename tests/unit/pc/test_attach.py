import copy
import re

import pytest
import torch
from torch import nn

import pc
from helpers.toy import ToyBlock
from pc import MatrixSplit, PCConfig, PCLinear, UserError
from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES, block_of
from pc.layer import put_in_graph

pytestmark = pytest.mark.fast


def _model(layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(ToyBlock(8, 12) for _ in range(layers))).double()


def _names(model):
    return {name for name, _ in pc.named_weights(model)}


def _ready(model, config):
    pc.precondition(pc.attach(model, config))
    return model


def test_blocks_groups_patterns_and_levels():
    expected = {f"{i}.{n}" for i in (0, 1) for n in ("attention.wo", *(f"feed_forward.w{k}" for k in (1, 2, 3)))}
    assert _names(pc.attach(_model(), PCConfig())) == expected
    model = pc.attach(_model(1), PCConfig(level={"qk": 1, "v": "polar_express"}, blocks=("qk", "v")))
    levels = {name: weight.config.only_level.name for name, weight in pc.named_weights(model)}
    assert levels == {"0.attention.wq": 1, "0.attention.wk": 1, "0.attention.wv": "polar_express"}
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))})
    assert _names(pc.attach(model, PCConfig(blocks=("encoder.[02]",)))) == {"encoder.0", "encoder.2"}


@pytest.mark.parametrize("group", BLOCK_GROUPS)
def test_a_group_is_of_blocks_that_there_are(group):
    """A misspelt one would match no layer, and nothing would say so while the others do."""
    assert set(BLOCK_GROUPS[group]) <= BLOCK_SUFFIXES.keys() and group not in BLOCK_SUFFIXES


def test_a_pattern_leaves_rows_of_another_name_out():
    """Such as the gate of Qwen3-Next's `q_proj`, here named z."""
    splits = {"0": MatrixSplit(("q", "z"))}
    with pytest.raises(UserError, match=r"'1\*' matches no weight"):
        pc.attach(nn.ModuleDict({"1": nn.Linear(3, 4)}), PCConfig(blocks=("1*",), splits={"1": MatrixSplit(("z",))}))
    for blocks in (("0*",), ("q",)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4))
        before = model[0].weight.detach().clone()
        _ready(model, PCConfig(blocks=blocks, splits=splits))
        assert torch.equal(model[0].weight[2:], before[2:])
        assert not torch.allclose(model[0].weight[:2], before[:2])  # control


class Mixture(nn.Module):
    """A dense layer and a layer of experts that no name or class tells apart."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": nn.Module()}) for _ in range(2)])
        for layer in self.layers:
            layer.mlp.gate_proj = nn.Linear(4, 6)
            layer.mlp.experts = nn.Parameter(torch.randn(3, 6, 4))


def test_what_a_group_misses_is_left_out_or_split():
    assert _names(pc.attach(Mixture(), PCConfig(blocks=("ffn",), splits={"*.experts": None}))) == {
        "layers.0.mlp.gate_proj",
        "layers.1.mlp.gate_proj",
    }
    config = PCConfig(blocks=("ffn",), splits={"*.experts": MatrixSplit(("down",))})
    lines = pc.describe(Mixture(), config).splitlines()
    assert "2 x layers.*.mlp.experts [3, 6, 4]: 3 times 1 of [6, 4], level 4" in lines


def test_none_in_splits_leaves_out_a_weight_that_an_entry_of_blocks_matches():
    splits, wo = {"0.attention.wo.weight": None}, {f"{i}.attention.wo" for i in range(2)}
    for blocks in (("o",), ("*.wo",)):
        assert _names(pc.attach(_model(), PCConfig(blocks=blocks))) == wo  # control
        assert _names(pc.attach(_model(), PCConfig(blocks=blocks, splits=splits))) == wo - {"0.attention.wo"}
        assert "1 x left out: *.attention.wo.weight [8, 8]\n" in pc.describe(
            _model(), PCConfig(blocks=blocks, splits=splits)
        )


def test_layers_are_known_by_all_names_of_their_module():
    """`fc1` alone, or an `fc1` that holds gate and up, is not known."""

    def known(**layers):
        model = nn.ModuleDict({"0": nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in layers.items()})})
        return "not known" not in pc.describe(model, PCConfig(blocks=("o",)))

    assert known(fc1=(4, 6), fc2=(6, 4)) and known(q_proj=(4, 4), k_proj=(4, 2), v_proj=(4, 2), out_proj=(4, 4))
    assert not known(fc1=(4, 12), fc2=(6, 4)) and not known(fc1=(4, 6))
    assert not known(q_proj=(4, 4), k_proj=(4, 2), v_proj=(4, 2), out_proj=(4, 4), g_proj=(4, 4))


def test_what_to_add_for_an_unknown_weight_is_printed_and_must_be_filled_in():
    """`describe` and the error of `attach` print an entry. As printed it is refused; with names in place of "?" it works."""
    entry = r'splits={"layers.*.mlp.experts": pc.MatrixSplit(("?",))}, with the names'
    _, unknown, *remedy = pc.describe(Mixture(), PCConfig(blocks=("gate",))).splitlines()
    assert unknown == "2 x left out: layers.*.mlp.experts [3, 6, 4], not known"
    assert remedy[0].startswith("If one") and remedy[1].startswith(entry) and len(remedy) == 2
    with pytest.raises(UserError, match=re.escape(entry)):
        pc.attach(Mixture(), PCConfig(blocks=("ffn",)))
    with pytest.raises(UserError, match=re.escape(entry)):  # a pattern
        pc.attach(Mixture(), PCConfig(blocks=("*.experts",)))
    printed = remedy[1].partition(", with")[0].removeprefix("splits=")
    with pytest.raises(UserError, match='put the names of the parts, such as .*, in place of "?"'):
        eval(printed)
    splits = eval(printed.replace('"?"', '"up", "down"'))
    assert len(_names(pc.attach(Mixture(), PCConfig(blocks=("ffn",), splits=splits)))) == 4
    assert "splits" not in pc.describe(Mixture(), PCConfig(blocks=("ffn",), splits=splits))


def test_a_shared_expert_does_not_hide_the_others():
    """The known weights are one module below the unknown ones, in the same layer."""
    model = Mixture()
    for layer in model.layers:
        layer.mlp.shared = nn.Module()
        for name in ("gate_proj", "up_proj"):
            layer.mlp.shared.add_module(name, nn.Linear(4, 6))
        layer.mlp.shared.down_proj = nn.Linear(6, 4)
        del layer.mlp.gate_proj
    with pytest.raises(UserError, match=r"'ffn' finds weights beside layers\.\*\.mlp\.experts, which may"):
        pc.attach(model, PCConfig(blocks=("ffn",)))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"level": 7}, "level 7 does not exist"),
        ({"level": {"o": 4}}, "pc.level names"),
        ({"level": [4]}, "two or more numbers"),
        ({"level": [1.5, float("nan")]}, "two or more numbers"),
        ({"level": [[1.0, 2.0]]}, "two or more numbers"),
        ({"level": {"o": {"q": 4}, "ffn": 4}}, "level {'q': 4} does not exist"),
        ({"level": {"o": 4, "ffn": [2.0, -3.0]}}, r"g\(1\.1\) = -1\.793"),
        ({"power_iterations": 0}, "power_iterations"),
        ({"heads": ["o"]}, "pc.heads: 'o' is not one of q, k, v"),
        ({"splits": {"*.qkv": ("q", "k", "v")}}, r"pc.splits: '\*.qkv' must be a pc.MatrixSplit or None"),
        ({"compute_dtype": "bfloat16"}, "must be one of float32, tf32, float16"),
    ],
)
def test_wrong_config(values, message):
    with pytest.raises(UserError, match=message):
        PCConfig(**values)


def test_a_word_is_a_list_of_one():
    assert PCConfig(blocks="ffn").blocks == ("ffn",) and PCConfig(heads="q").heads == ("q",)


def test_custom_coefficients_are_a_level():
    """The published coefficients of level 2 equal level 2, for all blocks or for one. A g(1) far from 1 gives a warning."""
    own = [2.083, -1.643, 0.560]
    x = torch.randn(3, 8, dtype=torch.float64)
    outputs = [_ready(_model(), PCConfig(level=level))(x) for level in (2, own, {"o": own, "ffn": 2})]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert len({PCConfig(level=level) for level in (own, tuple(own), 2)}) == 1  # a batch on a GPU has one config
    assert not torch.equal(_ready(_model(), PCConfig(level=[2.083, -1.643, 0.559]))(x), outputs[0])
    with pytest.warns(UserWarning, match=r"g\(1\) = 0\.9\b") as warned:  # once, at the line that makes the config
        pc.attach(_model(), PCConfig(level=[1.4, -0.5]))
    assert [warning.filename for warning in warned] == [__file__]


def _wrapped():
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Sequential(nn.Linear(4, 4))
    return wrapped


@pytest.mark.parametrize(
    "model, settings, message",
    [
        (lambda: pc.attach(nn.Sequential(nn.Linear(4, 4)), PCConfig(blocks=("0*",))), {}, "already has PC"),
        (_wrapped, {"blocks": ("*.0*",)}, "call pc.attach first"),
        (lambda: nn.Sequential(nn.Embedding(4, 4)), {}, "0.weight of Embedding, which is not known to be matrices"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4)),
            {"splits": {"0.weight": MatrixSplit(("q", "k", "v"))}},
            "does not fit 0.weight",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {"splits": {"1": MatrixSplit()}}, "pc.splits: '1' matches no weight"),
        (_model, {"blocks": ("ffm",)}, "'ffm' is not a block"),
        (_model, {"blocks": ()}, "empty"),
        (_model, {"blocks": ("decoder.*",)}, "matches no weight"),
        (_model, {"blocks": ("ffn", "gate")}, "an earlier entry"),
        (_model, {"norm_recovery": "false"}, "norm_recovery must be True or False, not 'false'"),
        (_model, {"power_iterations": 2.5}, "power_iterations must be a whole number"),
        (_model, {"level": [2000, -1999]}, "absolute values sum to 4e.03, so in tf32 rounding errors dominate PC"),
    ],
)
def test_what_cannot_be_attached_is_refused(model, settings, message):
    with pytest.raises(UserError, match=message):
        pc.attach(model(), PCConfig(**{"blocks": ("0*",)} | settings))


def test_a_layer_used_twice_is_one_weight():
    torch.manual_seed(0)
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    expected = _ready(model, PCConfig(blocks=("0*",)))(x)
    assert len(_names(model)) == 1 and torch.equal(pc.merge(model)(x), expected)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


def test_merge_gives_the_plain_model_with_equal_output():
    """With classes, hooks, frozen weights and eval mode as before."""
    plain = _model().eval()
    plain[0].attention["wo"].weight.requires_grad_(False)
    calls = []
    plain[0].attention["wo"].register_forward_hook(lambda *_: calls.append(1))
    before = [vars(module).keys() for module in plain[0].modules()]
    model = copy.deepcopy(plain)
    heads = {"heads": ("q",), "splits": {"*.wq.*": MatrixSplit(("q",), head_dim=4)}}
    _ready(model, PCConfig(blocks=("q", "o", "ffn"), **heads))
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = model(x)
    merged = pc.merge(copy.deepcopy(model))
    torch.testing.assert_close(merged(x), expected, rtol=1e-14, atol=1e-14)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    assert [vars(module).keys() for module in merged[0].modules()] == before
    assert [(type(m), m.training) for m in merged.modules()] == [(type(m), m.training) for m in plain.modules()]
    assert [p.requires_grad for p in merged.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert (plain(x) - expected).abs().max() > 1e-3 and len(calls) == 3  # control: PC changes the function


def test_a_pc_layer_used_directly():
    layer = PCLinear(6, 4, PCConfig(level=4), name="mine").double()
    layer.refresh()
    x = torch.randn(3, 6, dtype=torch.float64)
    effective = pc.effective_weight(layer.weight, layer.gamma, layer.u, layer.v, PCConfig())
    torch.testing.assert_close(layer(x), x @ effective.T + layer.bias)


def test_layers_in_the_graph_compile_without_a_break():
    model = _model(1)
    put_in_graph(model, PCConfig(blocks=("q", "ffn")))
    x = torch.randn(3, 8, dtype=torch.float64)
    model(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_the_name_of_a_layer_must_match_as_a_whole():
    assert block_of("layers.0.attention.wq") == block_of("attention.wq") == "q"
    assert block_of("layers.0.cross_attention.wq") is None


@pytest.mark.parametrize("given", [({"level": 4},), (None,), (4,)], ids=str)
@pytest.mark.parametrize("call", [pc.attach, pc.describe])
def test_settings_that_are_not_a_config_are_refused_in_one_line(call, given):
    with pytest.raises(UserError, match=f"takes a pc.PCConfig, not a {type(*given).__name__}; write pc.PCConfig"):
        call(_model(), *given)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT, or, with `c_q`, `c_k` and `c_v`, as in nanochat."""

    def __init__(self, *inputs):
        super().__init__()
        for name, size in [*inputs, ("c_proj", 6)]:
            self.add_module(name, nn.Linear(6, size))


class Block(nn.Module):
    def __init__(self, *inputs):
        super().__init__()
        self.attn = CausalSelfAttention(*inputs)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(6, 24), "c_proj": nn.Linear(24, 6)})


@pytest.mark.parametrize(
    "layer, qkv",
    [
        (lambda: Block(("c_attn", 18)), {"c_attn"}),
        (lambda: Block(("c_q", 6), ("c_k", 2), ("c_v", 2)), {"c_q", "c_k", "c_v"}),
        (lambda: nn.TransformerEncoderLayer(6, 2, 24), {"in_proj_weight"}),
        (lambda: nn.TransformerDecoderLayer(6, 2, 24), {"in_proj_weight"}),
    ],
    ids=["nanoGPT", "nanochat", "torch's encoder", "torch's decoder"],
)
def test_common_layers_are_known(layer, qkv):
    """With the default configuration, which needs no argument, and with all blocks."""
    model = nn.ModuleDict({"wte": nn.Embedding(5, 6), "h": nn.ModuleList([layer(), layer()]), "head": nn.Linear(6, 5)})
    linear = {name for name, module in model.h.named_modules() if isinstance(module, nn.Linear)}
    assert "not known" not in pc.describe(model.h, PCConfig())
    found = {name.removeprefix("h.") for name in _names(pc.attach(copy.deepcopy(model)))}
    assert found == {name for name in linear if name.rpartition(".")[2] not in qkv}
    more = _names(pc.attach(model, PCConfig(blocks=("qk", "v", "o", "ffn"))))
    assert {name.rpartition(".")[2] for name in more} == qkv | {name.rpartition(".")[2] for name in found}


@pytest.mark.parametrize(
    "blocks, proposed, count",
    [
        (("o", "ffn"), 'blocks=("ffn", "h.*.attn.mix", "h.*.attn.out")', 8),
        # a mistyped pattern may have meant layers with known names
        (("*.atn.out", "ffn"), 'blocks=("ffn", "h.*.attn.mix", "h.*.attn.out")', 8),
        (("*.mpl.*",), 'blocks=("h.*.attn.mix", "h.*.attn.out", "h.*.mlp.fc1", "h.*.mlp.fc2")', 8),
    ],
)
def test_layers_of_unknown_names_are_proposed_as_patterns(blocks, proposed, count):
    """The error and `describe` print patterns, which work as printed, after the entries that find something."""

    def model():
        layers = [
            nn.ModuleDict(
                {
                    "attn": nn.ModuleDict({"mix": nn.Linear(4, 12), "out": nn.Linear(4, 4)}),
                    "mlp": nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)}),
                }
            )
            for _ in range(2)
        ]
        return nn.ModuleDict({"h": nn.ModuleList(layers), "head": nn.Linear(4, 9)})

    said = f"pc.blocks: {blocks[0]!r} matches no weight of the model; name layers: {proposed}"
    with pytest.raises(UserError, match=re.escape(said)):
        pc.attach(model(), PCConfig(blocks=blocks))
    assert len(_names(pc.attach(model(), eval(f"PCConfig({proposed})")))) == count
    if "ffn" in blocks:
        assert proposed in pc.describe(model(), PCConfig(blocks=blocks))


def test_a_model_says_what_has_pc():
    """When printed. So does a copy, but not the plain model that merge leaves."""
    model = pc.attach(_model())
    assert str(model[0].attention["wo"]).endswith("bias=False, weight: PC, 1 of [8, 8], level 4)")
    assert str(model).count("PC, 1 of [8, 8], level 4") == 2 and str(copy.deepcopy(model)) == str(model)
    preconditioner = pc.precondition(model)
    assert str(preconditioner).splitlines() == [
        "Preconditioner of 8 weights",
        "  2 x *.attention.wo: 1 of [8, 8], level 4",
        "  2 x *.feed_forward.w1: 1 of [12, 8], level 4",
        "  2 x *.feed_forward.w2: 1 of [8, 12], level 4",
        "  2 x *.feed_forward.w3: 1 of [12, 8], level 4",
    ]
    assert str(pc.merge(model)) == str(_model())


ARGUMENTS = {
    "settings without a config": (
        lambda: pc.attach(_model(), level=4),
        "pc.attach takes its settings as a pc.PCConfig: pc.attach(model, pc.PCConfig(level=4))",
    ),
    "a model that is none": (lambda: pc.attach([1]), "takes a torch.nn.Module, not a list"),
    "parameters": (
        lambda: pc.precondition(model := pc.attach(_model()), model.parameters()),
        "pc.precondition takes optimizers, not a Parameter",
    ),
    "the wrong order": (
        lambda: pc.precondition(torch.optim.SGD((model := pc.attach(_model())).parameters(), lr=0.1), model),
        "the first argument should be the model, or its parts, not a SGD",
    ),
    "blocks that are no names": (lambda: PCConfig(blocks=5), "pc.blocks must be names or patterns, not 5"),
    "a number as text": (lambda: PCConfig(level="4"), "pc.level: PC level '4' is text; write 4, without quotes"),
    "a word for an optimizer": (
        lambda: pc.precondition(pc.attach(_model()), "adamw"),
        "pc.precondition takes optimizers, not a str",
    ),
    "preserve before attach": (lambda: pc.preserve(_model()), "pc.preserve found no weight with PC; call pc.attach"),
}


@pytest.mark.parametrize("call, said", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_a_wrong_kind_are_refused_in_one_line(call, said):
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        call()
    assert "\n" not in str(raised.value)

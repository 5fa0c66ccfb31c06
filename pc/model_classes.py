"""How the weights of known model classes are split.

From the general to the specific, which wins: what transformers says about a stack of experts; linear layers recognised
by the names of all layers of their module; a table of classes. No parameter of a class whose name ends in "Router" is one
of the blocks.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from pc.config import MatrixSplit

Splits = dict[str, MatrixSplit | Callable[[Any], MatrixSplit] | None]
"""Splits of a module's parameters, by their names in it. A function computes the split; None: known to be none of the
blocks."""

_QKV = ("q", "k", "v")

# Names of linear layers that tell what each is if all of them are in one module.
_TOGETHER: tuple[dict[str, str], ...] = (
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"},
    {"query": "q", "key": "k", "value": "v"},
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"fc1": "up", "fc2": "down"},
    {"c_fc": "up", "c_proj": "down"},
    {"dense_h_to_4h": "up", "dense_4h_to_h": "down"},
)


def _one(**blocks: str) -> Splits:
    """Weights of linear layers that are one matrix each, by the names of the layers."""
    return {f"{layer}.weight": MatrixSplit((block,)) for layer, block in blocks.items()}


def _none(*layers: str) -> Splits:
    """Weights of layers that are none of the blocks."""
    return dict.fromkeys(f"{layer}.weight" for layer in layers)


def _by_group(attention: Any) -> MatrixSplit:
    heads, groups = attention.config.num_attention_heads, attention.config.num_key_value_heads
    return MatrixSplit(_QKV, sizes=(heads, groups, groups))


def _falcon(attention: Any) -> MatrixSplit:
    """Each group of queries is followed by its key and value. There is one group, or one for each head, or some."""
    grouped = attention.new_decoder_architecture or attention.multi_query
    groups = attention.num_kv_heads if grouped else attention.num_heads
    return MatrixSplit(_QKV, sizes=(attention.num_heads // groups, 1, 1), repeats=groups)


def _linear_attention(attention: Any) -> MatrixSplit:
    """q, k, v, and the gate z of the output, for each key head."""
    values = attention.value_dim // attention.num_k_heads
    sizes = (attention.head_k_dim, attention.head_k_dim, values, values)
    return MatrixSplit(("q", "k", "v", "z"), sizes=sizes, repeats=attention.num_k_heads)


_FACTORED_ATTENTION: Splits = {
    **_one(q_a_proj="q", q_b_proj="q"),
    **_none("kv_a_proj_with_mqa"),  # shared by keys and values
    "kv_b_proj.weight": lambda module: MatrixSplit(
        ("k", "v"), sizes=(module.qk_nope_head_dim, module.v_head_dim), repeats=module.num_heads
    ),
}
_GATED_QUERY: Splits = {  # each head's query, then the gate of its output
    "q_proj.weight": lambda module: MatrixSplit(("q", "z"), repeats=module.config.num_attention_heads)
}
_GATE_UP: Splits = {"gate_up_proj.weight": MatrixSplit(("gate", "up")), **_one(down_proj="down")}
_NUMBERED = {"w1": "gate", "w2": "down", "w3": "up"}

# Weights of transformers, TorchTitan, torch and others that the names of layers do not identify: parameters by the class
# of their module.
KNOWN: dict[str, Splits] = {
    "Phi3Attention": {"qkv_proj.weight": _by_group},
    "PhiAttention": _one(dense="o"),
    **dict.fromkeys(("Phi3MLP", "GlmMLP", "Glm4MLP"), _GATE_UP),
    "GPT2Attention": {
        "c_attn.weight": MatrixSplit(_QKV, transposed=True),
        "c_proj.weight": MatrixSplit(("o",), transposed=True),
    },
    "GPT2MLP": {
        "c_fc.weight": MatrixSplit(("up",), transposed=True),
        "c_proj.weight": MatrixSplit(("down",), transposed=True),
    },
    "GPTNeoXAttention": {
        "query_key_value.weight": lambda module: MatrixSplit(_QKV, repeats=module.config.num_attention_heads),
        **_one(dense="o"),
    },
    # nanoGPT's, and nanochat's
    "CausalSelfAttention": {
        "c_attn.weight": MatrixSplit(_QKV),
        **_one(c_q="q", c_k="k", c_v="v", c_proj="o"),
        **_none("ve_gate"),
    },
    # torch's
    "MultiheadAttention": {"in_proj_weight": MatrixSplit(_QKV), **_one(out_proj="o")},
    **dict.fromkeys(("TransformerEncoderLayer", "TransformerDecoderLayer"), _one(linear1="up", linear2="down")),
    "GPTJMLP": _one(fc_in="up", fc_out="down"),
    "FalconAttention": {"query_key_value.weight": _falcon, **_one(dense="o")},
    "MptAttention": {"Wqkv.weight": MatrixSplit(_QKV), **_one(out_proj="o")},
    "MptMLP": _one(up_proj="up", down_proj="down"),
    "ModernBertAttention": {"Wqkv.weight": MatrixSplit(_QKV), **_one(Wo="o")},
    "ModernBertMLP": {"Wi.weight": MatrixSplit(("gate", "up")), **_one(Wo="down")},
    "Lfm2ShortConv": _none("conv", "in_proj", "out_proj"),
    "Qwen3NextGatedDeltaNet": {
        "in_proj_qkvz.weight": _linear_attention,
        **_one(out_proj="o"),
        **_none("in_proj_ba", "conv1d"),
    },
    **dict.fromkeys(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        {
            "in_proj_qkv.weight": lambda module: MatrixSplit(
                _QKV, sizes=(module.key_dim, module.key_dim, module.value_dim)
            ),
            **_one(out_proj="o"),
            **_none("in_proj_z", "in_proj_b", "in_proj_a", "conv1d"),
        },
    ),
    **dict.fromkeys(("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"), _GATED_QUERY),
    **dict.fromkeys(
        ("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock"), _none("shared_expert_gate")
    ),
    "OlmoHybridGatedDeltaNet": _none("a_proj", "b_proj", "g_proj", "conv1d"),
    **dict.fromkeys(
        ("GraniteMoeSharedMLP", "GraniteMoeHybridMLP"),
        {"input_linear.weight": MatrixSplit(("gate", "up")), **_one(output_linear="down")},
    ),
    "HunYuanMoEV1Gate": _none("wg"),
    "Llama4TextExperts": {
        "gate_up_proj": MatrixSplit(("gate", "up"), transposed=True),
        "down_proj": MatrixSplit(("down",), transposed=True),
    },
    **dict.fromkeys(("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention"), _FACTORED_ATTENTION),
    # TorchTitan's; other classes of these names have other parameters
    "Attention": {
        **_one(wq_a="q", wq_b="q"),
        **_none("wkv_a"),
        "wkv_b.weight": lambda module: MatrixSplit(
            ("k", "v"), sizes=(module.qk_nope_head_dim, module.v_head_dim), repeats=module.n_heads
        ),
    },
    "FeedForward": _one(**_NUMBERED),
    "GroupedExperts": {  # as 0.2.2 names them, then 0.3.0
        **{key: MatrixSplit((block,)) for key, block in _NUMBERED.items()},
        **dict(w1_EFD=MatrixSplit(("gate",)), w2_EDF=MatrixSplit(("down",)), w3_EFD=MatrixSplit(("up",))),
    },
    # of 0.3.0 alone
    "QKVLinear": _one(wq="q", wk="k", wv="v"),
    "FusedQKVLinear": {
        "wqkv.weight": lambda module: MatrixSplit(
            _QKV, sizes=(module.heads_per_kv, 1, 1), repeats=len(module.wqkv.weight) // (module.r_dim * module.head_dim)
        )
    },
    "GptOssGroupedExperts": {  # rows of gate and up alternate
        "mlp1_weight_EGD": lambda module: MatrixSplit(("gate", "up"), repeats=module.mlp1_weight_EGD.size(1) // 2),
        "mlp2_weight_EDF": MatrixSplit(("down",)),
        **dict.fromkeys(("mlp1_bias_EG", "mlp2_bias_ED")),
    },
}
_BERTS = (
    "Bert BertGeneration BigBird Camembert Data2VecText Electra Ernie Esm Git MegatronBert RemBert RoCBert RoFormer "
    "Roberta RobertaPreLayerNorm XLMRoberta XLMRobertaXL"
)
for _name in _BERTS.split():
    KNOWN |= {
        f"{_name}SelfOutput": _one(dense="o"),
        f"{_name}Intermediate": _one(dense="up"),
        f"{_name}Output": _one(dense="down"),
    }


def splits_of_module(module: nn.Module) -> dict[str, MatrixSplit | None]:
    """Splits of the parameters of a module, as far as its class or the names of its layers tell them."""
    name = type(module).__name__
    if name.endswith("Router"):
        return dict.fromkeys(key for key, _ in module.named_parameters())
    of_class = {key: split for key, split in KNOWN.get(name, {}).items() if hasattr(module, key.partition(".")[0])}
    splits = _of_experts(module) | _of_layers(module) | of_class
    return {key: split(module) if callable(split) else split for key, split in splits.items()}


def _of_experts(module: Any) -> Splits:
    """Splits of a stack of experts in transformers, whose attributes say how it is stored (`use_experts_implementation`)."""
    if not hasattr(module, "is_concatenated"):
        return {}
    names = [key for key, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1]
    splits: Splits = dict.fromkeys(key for key in names if key.endswith("_bias"))
    for key, blocks in (("gate_up_proj", ("gate", "up")), ("up_proj", ("up",)), ("down_proj", ("down",))):
        if key in names:
            alternate = len(blocks) > 1 and not module.is_concatenated
            outputs = getattr(module, key).size(-1 if module.is_transposed else -2)
            repeats = outputs // 2 if alternate else 1
            splits[key] = MatrixSplit(blocks, repeats=repeats, transposed=module.is_transposed)
    return splits


def _of_layers(module: nn.Module) -> Splits:
    """Splits of a module whose linear layers have names of `_TOGETHER`."""
    layers = {key: child for key, child in module.named_children() if isinstance(child, nn.Linear)}
    splits: Splits = {}
    for blocks in _TOGETHER:
        named = {block: layers[key] for key, block in blocks.items() if key in layers}
        if len(named) < len(blocks):
            continue
        if "down" in named and named["up"].out_features != named["down"].in_features:
            continue  # not the `up` of this `down`: another kind of layer, or gate and up fused
        splits |= _one(**blocks)
    return splits

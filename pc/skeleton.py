"""A checkpoint's names and shapes as a module on the meta device, so that `pc.targets` finds its matrices as in a real one.

A file has no classes. Where config.json names the architecture, each module whose place and weights are those of a known
class gets that class's name, and the settings in place of attributes. No code of a model is loaded.
"""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pc.model_classes import KNOWN

# {class name after the architecture's: last words of the names of its modules}
_PLACES = {
    "SelfOutput": ("attention.output",),
    "Intermediate": ("intermediate",),
    "Output": ("output",),
    "Attention": ("attn", "attention", "self_attn", "self_attention"),
    "MLP": ("mlp", "ffn", "shared_mlp", "block_sparse_moe"),
    "TextExperts": ("experts",),
    "GatedDeltaNet": ("linear_attn",),
    "ShortConv": ("conv",),
    "SparseMoeBlock": ("mlp",),
    "Gate": ("gate",),
}
_STORED_AS = {"ViT": "Bert"}  # transformers renames the weights of these when it reads them
_MIXTRAL = {"w1", "w2", "w3"}  # as in TorchTitan's FeedForward: gate, down, up


class _Part(nn.Module):
    """A module of a checkpoint. Its attributes are the model's settings."""

    config: SimpleNamespace

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError:
            return getattr(type(self).config, key)


def build(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], config: Mapping[str, Any]) -> nn.Module:
    """The module of tensors {name: (dtype, shape)}. `config`, a config.json's or empty, says classes and settings."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        node = tree
        for word in path:
            node = node.setdefault(word, {})
            if not isinstance(node, dict):  # a tensor whose name is also the beginning of another's
                break
        else:
            node[key] = tensor
    return _module("", tree, _settings(config), _prefix(config))


def _prefix(config: Mapping[str, Any]) -> str:
    """What a model's class names begin with: "GPTNeoX" for "GPTNeoXForCausalLM"."""
    architectures = config.get("architectures") or [""]
    prefix = re.split(r"For[A-Z]|LMHead|DoubleHeads|Model$", architectures[0])[0]
    return _STORED_AS.get(prefix, prefix)


def _settings(config: Mapping[str, Any]) -> SimpleNamespace:
    """Settings under the attribute names that modules give them."""
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    heads = values.get("num_attention_heads", values.get("n_head", values.get("n_heads")))
    names = {
        "head_k_dim": "linear_key_head_dim",
        "head_v_dim": "linear_value_head_dim",
        "num_k_heads": "linear_num_key_heads",
        "num_v_heads": "linear_num_value_heads",
    }
    values |= {name: values[key] for name, key in names.items() if key in values}
    if values.keys() >= names.keys():
        values["key_dim"] = values["num_k_heads"] * values["head_k_dim"]
        values["value_dim"] = values["num_v_heads"] * values["head_v_dim"]
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        values["num_kv_heads"] = 1  # Falcon has one group, whatever else its settings say
    usual = {"num_attention_heads": heads, "num_heads": heads, "num_key_value_heads": heads, "num_kv_heads": heads}
    settings = SimpleNamespace(**{key: value for key, value in usual.items() if heads} | values)
    settings.config = settings
    return settings


def _module(name: str, tree: dict[str, Any], settings: SimpleNamespace, prefix: str) -> nn.Module:
    tensors = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    children = {key: value for key, value in tree.items() if isinstance(value, dict)}
    weight = tensors.get("weight")
    if not children and weight and len(weight[1]) == 2 and weight[0].is_floating_point and 0 not in weight[1]:
        module: Any = nn.Linear(weight[1][1], weight[1][0], bias=False, device="meta", dtype=weight[0])
        del tensors["weight"]
    else:
        module = type(_class_of(name, tree, prefix), (_Part,), {"config": settings})()
    for key, (dtype, shape) in tensors.items():
        module._parameters[key] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    _say_how_experts_are_stored(module, settings)
    for key, child in children.items():
        module._modules[key] = _module(f"{name}.{key}" if name else key, child, settings, prefix)
    return module


def _class_of(name: str, tree: dict[str, Any], prefix: str) -> str:
    """The known class that a module is of, "Part" for any other."""
    if tree.keys() == _MIXTRAL:
        return "FeedForward"
    for known, splits in KNOWN.items():
        places = _PLACES.get(known.removeprefix(prefix), ())
        has_weights = any(key.partition(".")[0] in tree for key in splits)
        if known.startswith(prefix) and has_weights and any(f".{name}".endswith(f".{place}") for place in places):
            return known
    return "Part"


def _say_how_experts_are_stored(module: Any, settings: SimpleNamespace) -> None:
    """Set the attributes that tell the layout of a stack of experts in transformers, from the shapes [experts, ...]."""
    down: Any = getattr(module._parameters.get("down_proj"), "shape", ())
    up: Any = getattr(module._parameters.get("gate_up_proj"), "shape", ())
    if len(down) == len(up) == 3:
        module.is_transposed = up[2] == 2 * down[1] and up[1] == down[2]
        module.is_concatenated = getattr(settings, "model_type", "") != "gpt_oss"

"""Reads a Hugging Face folder of weights and checks whether a run can start from it. Its imports take seconds."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from transformers import LlamaConfig, LlamaForCausalLM

from pc.errors import UserError
from pc_recipe.files import look
from pc_recipe.files.inside import inside, require_plain

# Settings that determine a Llama's function of its weights.
_ARCHITECTURE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "attention_bias", "mlp_bias",
)  # fmt: skip


def to_llama_config(model_args: TransformerModelArgs, ffn_dim: int) -> LlamaConfig:
    """Hugging Face's config of TorchTitan's model."""
    base = float(model_args.rope_theta)
    config = LlamaConfig(
        vocab_size=model_args.vocab_size,
        hidden_size=model_args.dim,
        intermediate_size=ffn_dim,
        num_hidden_layers=model_args.n_layers,
        num_attention_heads=model_args.n_heads,
        num_key_value_heads=model_args.n_kv_heads or model_args.n_heads,
        max_position_embeddings=model_args.max_seq_len,
        rms_norm_eps=model_args.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        tie_word_embeddings=False,
    )
    config.rope_theta = base  # where transformers 4 and mlx-lm look; LlamaConfig itself takes it as `rope_parameters`
    return config


def require_initial_load(path: str | Path, model_args: TransformerModelArgs) -> None:
    """Check that a run can start from a Hugging Face folder, before any weight is loaded.

    TorchTitan's own loader silently accepts an extra tensor, another RoPE base or tied embeddings, which change the
    model.

    Raises:
        UserError: naming the setting or tensor that differs.
    """
    path = Path(path)
    found = find_tensors(path)
    given = _read_config(path, found)
    with torch.device("meta"):
        block: Any = Transformer(model_args).layers["0"]
        expected = to_llama_config(model_args, block.feed_forward.w1.out_features)
        model = LlamaForCausalLM(expected)
    for key in _ARCHITECTURE:
        if getattr(given, key) != getattr(expected, key):
            raise UserError(
                f"{path}: config.json has {key} {getattr(given, key)}, the run's model {getattr(expected, key)}"
            )
    for key in [key for key in found if key.endswith(".rotary_emb.inv_freq")]:  # Llama 2's own folders have them
        with safe_open(found[key].file, framework="pt") as tensors:
            frequencies = model_args.rope_theta ** -torch.arange(0, 1, 2 * model_args.n_heads / model_args.dim)
            # saved in two bytes each; with another base they differ by much more
            if not torch.allclose(tensors.get_tensor(key).float(), frequencies, rtol=1e-2):
                raise UserError(
                    f"{path}: tensor {key} is not what the run's model has, rope_theta {model_args.rope_theta}"
                )
        del found[key]
    shapes = {key: tensor.shape for key, tensor in found.items()}
    require_shapes({key: tensor.shape for key, tensor in model.state_dict().items()}, shapes, path)


def _read_config(folder: Path, tensors: Mapping[str, "Found"]) -> LlamaConfig:
    try:
        settings = read_settings(folder, tensors)
        if settings.get("model_type") != "llama":
            raise UserError(f'model_type {settings.get("model_type")!r}, but a run starts only from "llama"')
        return LlamaConfig(**settings)
    except Exception as error:  # transformers checks types by an exception of its own
        raise UserError(f"{folder / 'config.json'}: {' '.join(str(error).split())[:200]}") from None


def read_settings(folder: Path, tensors: Mapping[str, "Found"]) -> dict[str, Any]:
    """What config.json says.

    Raises:
        UserError: a number in it is larger than anything in the weights.
    """
    settings = dict(json.loads(look.read(folder / "config.json") or b"{}"))
    largest = max((size for tensor in tensors.values() if all(tensor.shape) for size in tensor.shape), default=0)
    for name, number in _integers(settings):
        most = len(tensors) if "layer" in name else largest
        if number > most and not _MAY_BE_LARGER.search(name):
            raise UserError(f"config.json has {name} = {number}, but its weights allow at most {most}")
    return settings


_MAY_BE_LARGER = re.compile(r"_ids?$|theta|window|^(original_)?max_")
"""Names of numbers that no size in the weights limits."""


def _integers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """(the name above it, number) of each integer in a JSON value, at any depth."""
    if type(value) is int:
        yield name, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _integers(inner, key)
    for inner in value if isinstance(value, list) else ():
        yield from _integers(inner, name)


@dataclass(frozen=True)
class Found:
    """A tensor in a file."""

    file: Path
    shape: list[int]


def find_tensors(folder: Path) -> dict[str, Found]:
    """{name: where it is} of the tensors in the single file or in those that the index names, as transformers reads them.

    Raises:
        UserError: a file is missing or damaged, or another one has a tensor of the same name, which TorchTitan might read.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    used = [single]
    try:
        require_plain(folder)
        if look.is_there(index) and not look.is_there(single):
            used = sorted({inside(folder, name) for name in json.loads(index.read_bytes())["weight_map"].values()})
        names = look.names(folder)
        if not look.is_there(used[0]) and (other := [name for name in names if name.endswith(".bin")]):
            raise UserError(
                f"{folder / other[0]} is not a safetensors file: load it with transformers and `save_pretrained` it"
            )
        if "adapter_config.json" in names:  # it would change the weights, and may name other weights
            raise UserError(
                "it has an adapter, adapter_config.json: `merge_and_unload` it with peft and save the result"
            )
        found: dict[str, Found] = {}
        others = [folder / name for name in names if name.endswith(".safetensors")]
        for file in [*used, *(file for file in others if file not in used)]:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    one = Found(file, tensors.get_slice(key).get_shape())
                    if (known := found.setdefault(key, one)) is not one:
                        raise UserError(
                            f"tensor {key} is in {known.file.name} and in {file.name}: remove the wrong file"
                        )
    except Exception as error:  # one of safetensors' own, or of the file system
        raise UserError(f"{folder}: {error}") from None
    return {key: one for key, one in found.items() if one.file in used}


def require_shapes(
    expected: dict[str, torch.Size], saved: Mapping[str, Sequence[int] | None], path: Path, whose: str = ""
) -> None:
    """Raise `UserError` if an entry of `path` is extra, missing, misshapen or (shape None) not a tensor.

    Args:
        whose: words after "the model" in the error.
    """
    for key in sorted(expected.keys() | saved.keys()):
        shapes = [None if (shape := entries.get(key)) is None else [*shape] for entries in (saved, expected)]
        problem = f"has shape {shapes[0]}, the model{whose} {shapes[1]}" if shapes[0] != shapes[1] else ""
        if key not in saved:
            problem = "is missing"
        elif key not in expected:
            problem = f"does not belong to the model{whose}"
        if problem:
            raise UserError(f"{path}: tensor {key} {problem}")

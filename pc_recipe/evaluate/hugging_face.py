"""Convert a run's weights to an ordinary `LlamaForCausalLM`, in memory or as a folder; check such folders."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pc.errors import UserError
from pc_recipe.data.tokenizers import Tokenizer, load_tokenizer
from pc_recipe.evaluate import plain_weights
from pc_recipe.evaluate.model_card import model_card
from pc_recipe.evaluate.plain_weights import RunCheckpoint
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.errors import WriteFailed
from pc_recipe.train import run_tokenizer

# Settings that determine a Llama's function of its weights.
_ARCHITECTURE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "attention_bias", "mlp_bias",
)  # fmt: skip


def to_llama_config(model_args: TransformerModelArgs, ffn_dim: int) -> LlamaConfig:
    """Hugging Face's config of TorchTitan's model."""
    return LlamaConfig(
        vocab_size=model_args.vocab_size,
        hidden_size=model_args.dim,
        intermediate_size=ffn_dim,
        num_hidden_layers=model_args.n_layers,
        num_attention_heads=model_args.n_heads,
        num_key_value_heads=model_args.n_kv_heads or model_args.n_heads,
        max_position_embeddings=model_args.max_seq_len,
        rms_norm_eps=model_args.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(model_args.rope_theta)},
        tie_word_embeddings=False,
    )


def to_llama(weights: dict[str, Tensor], model_args: TransformerModelArgs) -> LlamaForCausalLM:
    """A Llama with `weights` (TorchTitan's names, effective weights); they are copied at most once."""
    config = to_llama_config(model_args, ffn_dim=weights["layers.0.feed_forward.w1.weight"].shape[0])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    converted = Llama3StateDictAdapter(model_args, hf_assets_path=None).to_hf(weights)
    # contiguous, because the adapter's permutation of wq and wk may give views, which safetensors refuses
    model.load_state_dict({k: v.contiguous() for k, v in converted.items()}, strict=True, assign=True)
    # `inv_freq` is not in the state dict and still on the meta device
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model.eval()


def load_checkpoint(run: RunCheckpoint, tokenizer: str | None = None) -> tuple[LlamaForCausalLM, Tokenizer]:
    """Model and tokenizer of a run's checkpoint, in memory; tokenizer: as in `run_tokenizer.of_run`."""
    loaded = run_tokenizer.of_run(run.folder, tokenizer)
    _require_vocabulary(loaded.vocab_size, run.model_args.vocab_size, run.path)
    model = to_llama(run.weights, run.model_args)
    ids = {"bos_token_id": loaded.bos_id, "eos_token_id": loaded.eos_id, "pad_token_id": loaded.eos_id}
    model.config.update(ids | {"tokenizer": loaded.names})
    model.generation_config = GenerationConfig(**ids, do_sample=True)
    return model, loaded


def _require_vocabulary(ids: int, vocab_size: int, path: Path) -> None:
    """A model may have more rows than its tokenizer has ids, such as rows up to a round number."""
    if ids > vocab_size:
        raise UserError(f"{path}: the model has {vocab_size} tokens, its tokenizer {ids}")


def load(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run's checkpoint or of any Hugging Face folder, for scoring and sampling."""
    if look.is_file(Path(path, "config.json")):
        return _load_folder(Path(path))
    run = plain_weights.load(path)
    model, tokenizer = load_checkpoint(run)
    return model, tokenizer.to_transformers(run.model_args.max_seq_len)


def export(
    source: str | Path,
    out: str | Path,
    dtype: str = "float32",
    tokenizer: str | None = None,
    scores: str | Path | None = None,
) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder; returns it. `out` must not exist or be empty.

    scores: the table.md of scripts/score.py, for the model card.

    Raises:
        WriteFailed: the file system refuses, and nothing is left of the export.
    """
    out = Path(out).resolve()  # a folder cannot be renamed to a symbolic link
    if look.is_there(out) and look.names(out):
        raise UserError(f"{out}: exists already; give a new folder")
    run = plain_weights.load(source)
    model, loaded = load_checkpoint(run, tokenizer)
    model = model.to(getattr(torch, dtype))
    card = model_card(run, model, loaded, dtype, scores)
    try:
        _write(model, loaded, run.model_args.max_seq_len, card, out)
    except Exception as error:  # of the system, which safetensors raises as an exception of its own
        cause = error.__cause__ if isinstance(error, WriteFailed) else error
        if not isinstance(cause, OSError) and "(os error " not in str(cause):
            raise
        raise WriteFailed(f"could not write {out}: {getattr(cause, 'strerror', None) or cause}") from error
    return out


def _write(model: LlamaForCausalLM, tokenizer: Tokenizer, max_length: int, card: str, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted export does not look complete.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / out.name
        model.save_pretrained(folder)
        tokenizer.save(folder, max_length)
        write_atomically(folder / "README.md", card)
        for file in folder.iterdir():  # safetensors makes files that only the owner can read
            shutil.copymode(folder / "README.md", file)
        os.replace(folder, out)


def require_initial_load(path: str | Path, model_args: TransformerModelArgs) -> None:
    """Check that a run can start from a Hugging Face folder, before any weight is loaded.

    TorchTitan's own loader silently accepts an extra tensor, another RoPE base or tied embeddings, which change the
    model.

    Raises:
        UserError: naming the setting or tensor that differs.
    """
    path = Path(path)
    file = path / "config.json"
    settings = json.loads(look.read(file) or b"{}")
    if settings.get("model_type") != "llama":
        raise UserError(f'{file}: model_type {settings.get("model_type")!r}, a run starts from "llama"')
    with torch.device("meta"):
        block: Any = Transformer(model_args).layers["0"]
        expected = to_llama_config(model_args, block.feed_forward.w1.out_features)
        model = LlamaForCausalLM(expected)
    given = LlamaConfig(**settings)
    for key in _ARCHITECTURE:
        if getattr(given, key) != getattr(expected, key):
            raise UserError(
                f"{path}: config.json has {key} {getattr(given, key)}, the run's model {getattr(expected, key)}"
            )
    found = _find_tensors(path)
    for key in [key for key in found if key.endswith(".rotary_emb.inv_freq")]:  # Llama 2's own folders have them
        with safe_open(found[key].file, framework="pt") as tensors:
            frequencies = model_args.rope_theta ** -torch.arange(0, 1, 2 * model_args.n_heads / model_args.dim)
            # they are saved in two bytes; of another base they differ by much more
            if not torch.allclose(tensors.get_tensor(key).float(), frequencies, rtol=1e-2):
                raise UserError(
                    f"{path}: tensor {key} is not what the run's model has, rope_theta {model_args.rope_theta}"
                )
        del found[key]
    shapes = {key: tensor.shape for key, tensor in found.items()}
    plain_weights.require_shapes({key: tensor.shape for key, tensor in model.state_dict().items()}, shapes, path)


@dataclass(frozen=True)
class _Found:
    file: Path
    shape: list[int]


def _find_tensors(folder: Path) -> dict[str, _Found]:
    """{name: where it is} of the tensors in the single file or in those that the index names, as transformers reads them.

    Raises:
        UserError: a file is missing or damaged, or another one has a tensor of the same name; TorchTitan would read any.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    used = [single]
    try:
        if look.is_there(index) and not look.is_there(single):
            used = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        names = look.names(folder)
        if not look.is_there(used[0]) and (other := [name for name in names if name.endswith(".bin")]):
            raise UserError(f"{folder / other[0]} is no safetensors file: load it with transformers and `save_pretrained` it")
        found: dict[str, _Found] = {}
        others = (folder / name for name in names if name.endswith(".safetensors"))
        for file in [*used, *(file for file in others if file not in used)]:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    one = _Found(file, tensors.get_slice(key).get_shape())
                    if (known := found.setdefault(key, one)) is not one:
                        raise UserError(
                            f"tensor {key} is in {known.file.name} and in {file.name}: remove the wrong file"
                        )
    except Exception as error:  # of safetensors, which has its own, or the file system
        raise UserError(f"{folder}: {error}") from None
    return {key: one for key, one in found.items() if one.file in used}


def _load_folder(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    _find_tensors(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported by name
        )
        model, report = loaded
    except Exception as error:  # with a damaged folder transformers may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not a Llama that transformers can read ({reason})") from None
    # transformers fills missing tensors with random numbers and drops extra ones
    for kind in ("mismatched", "missing", "unexpected"):
        # a mismatched tensor is reported with its shapes, in the file and by config.json
        for tensor in sorted(report[f"{kind}_keys"]):
            raise UserError(f"{path}: tensor {tensor} is {kind}")
    _require_vocabulary(len(tokenizer), model.config.vocab_size, path)
    if names := run_tokenizer.exported_names(path):
        run_tokenizer.require_equal(names, load_tokenizer(path).names, f"{path} belongs to", "its folder now has")
    return model.eval(), tokenizer

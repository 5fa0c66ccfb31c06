"""Convert a run's weights to an ordinary `LlamaForCausalLM`, in memory or as a folder; check such folders."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pc.errors import UserError
from pc_recipe.checkpoints import run_tokenizer
from pc_recipe.checkpoints.hf_folder import find_tensors, read_settings, to_llama_config
from pc_recipe.data.tokenizer_formats import without_panics
from pc_recipe.data.tokenizers import Tokenizer, load_tokenizer
from pc_recipe.evaluate import plain_weights
from pc_recipe.evaluate.model_card import model_card, without_folders
from pc_recipe.evaluate.plain_weights import RunCheckpoint
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.errors import WriteFailed


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
    loaded.name = without_folders(loaded.name)
    ids = {"bos_token_id": loaded.bos_id, "eos_token_id": loaded.eos_id}
    model.config.update(ids | {"tokenizer": loaded.names})  # the embedding of a pad_token_id would have no gradient
    model.generation_config = GenerationConfig(**ids, pad_token_id=loaded.eos_id, do_sample=True)
    return model, loaded


def _require_vocabulary(ids: int, vocab_size: int, path: Path) -> None:
    """A model may have more rows than its tokenizer has ids, to make their number round."""
    if ids > vocab_size:
        raise UserError(f"{path}: the model has {vocab_size} tokens, its tokenizer {ids}")


def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run's checkpoint or of any Hugging Face folder, for scoring and sampling."""
    if look.is_file(path / "config.json"):
        return _load_folder(path)
    run = plain_weights.load(path)
    model, tokenizer = load_checkpoint(run)
    return model, tokenizer.to_transformers(run.model_args.max_seq_len)


def export(
    source: Path,
    out: str | Path,
    dtype: str = "float32",
    tokenizer: str | None = None,
    scores: str | Path | None = None,
) -> Path:
    """Write a checkpoint of a run as a Hugging Face folder; returns it. `out` must be missing or empty.

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
    except Exception as error:  # safetensors raises system errors as its own exception
        cause = error.__cause__ if isinstance(error, WriteFailed) else error
        if not isinstance(cause, OSError) and "(os error " not in str(cause):
            raise
        raise WriteFailed(f"could not write {out}: {getattr(cause, 'strerror', None) or cause}") from error
    return out


def _write(model: LlamaForCausalLM, tokenizer: Tokenizer, max_length: int, card: str, out: Path) -> None:
    with _unfinished(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save(folder, max_length)
        write_atomically(folder / "README.md", card)
        for file in folder.iterdir():  # safetensors makes files that only the owner can read
            shutil.copymode(folder / "README.md", file)
        os.replace(folder, out)


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """An empty folder beside `out`, to be renamed to it when complete. Its name is always the same, so that the next export
    finds and removes what a killed one left.

    Raises:
        UserError: another export is writing there.
    """
    folder = out.with_name(f".{out.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _hold(opened, out)
        try:
            for file in folder.iterdir():
                file.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(opened)


def _hold(opened: int, out: Path) -> None:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out}: another process is exporting to it") from None
    except OSError:  # a file system without locks
        pass


def _load_folder(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tensors, names = find_tensors(path), run_tokenizer.exported_names(path)
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        read_settings(path, tensors)
        config: Any = AutoConfig.from_pretrained(path, **local)
        config._attn_implementation = None  # the default, whatever the config names
        with without_panics():
            # in a text for an export, "</s>" is text, as in training
            tokenizer = AutoTokenizer.from_pretrained(
                path, **local, **({"split_special_tokens": True} if names else {})
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported by name
            **local,
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
    if names and not (own := load_tokenizer(path)).has_checksum(names["sha256"]):
        belongs = f'{path}: by "tokenizer" in config.json it belongs to'
        run_tokenizer.require_equal(names, own.names, belongs, "its folder now has")
    # the folder's own sampling settings, such as a number of beams, are ignored
    ids = {f"{kind}_token_id": getattr(model.generation_config, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids, do_sample=True)
    return model.eval(), tokenizer

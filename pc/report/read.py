"""A checkpoint on disk: names and shapes first, tensors one at a time. Nothing in it is executed."""

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pc import skeleton
from pc.errors import UserError
from pc.targets import clean_name

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"C64": torch.complex64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool}
_QUANTISED = (".qweight", ".SCB", ".absmax", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")  # beside the weights of a Trainer
_GIVE = "give a folder with safetensors or .bin files, a .safetensors file, or a .pt file of a state dict"
_UNQUANTISED = "give the weights in bfloat16, float16 or float32 that it was made from"


_FACTORS_ONLY = (
    True,
    False,
    "gaussian",
    "eva",
    "orthogonal",
)  # other initialisations of LoRA change the base's weights too


class Entry(NamedTuple):
    """A tensor of a file."""

    dtype: torch.dtype
    """torch.uint8 for any type that is not in `_DTYPES`: those are types of quantised weights"""
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class Tensors(NamedTuple):
    """What a checkpoint holds: its name, tensors by their names in the model, and config.json's content."""

    name: str
    entries: Mapping[str, Entry]
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    name: str
    model: nn.Module
    """without values"""
    load: Callable[[str], Tensor]
    """a tensor by its name in `model`"""


def of_tensors(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = {}) -> Checkpoint:
    """The checkpoint of tensors in memory, by name."""
    return _checkpoint(Tensors(name, _of_model(name, _entries(tensors)), config))


def read(path: Path, base: Path | None = None) -> Checkpoint:
    """A folder as transformers writes it, or a file of tensors.

    Args:
        base: folder of the model that an adapter changes; default: the one that the adapter names, if it is here.

    Raises:
        UserError: nothing there that can be read without running code, damaged files, quantised weights.
    """
    try:
        return _checkpoint(_read(path, base))
    except (UserError, OSError):
        raise
    except Exception as error:  # other people's files may contain anything
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {str(error)[:200]})") from None


def _read(path: Path, base: Path | None) -> Tensors:
    if not path.exists():
        raise UserError(f"{path}: not there; {_GIVE}. Models on the Hub are not fetched; use `hf download NAME`")
    if path.is_file():
        return _of_files(path.name, [path], {}, None)
    if (path / "adapter_config.json").is_file():  # a pipe would have no end
        return _merged(path, base)
    if (path / ".metadata").exists():
        raise UserError(
            f"{path}: a distributed checkpoint; for a run of this recipe use `scripts/spectra.py RUN --report`, else "
            "convert it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`"
        )
    config = _json(path / "config.json") if (path / "config.json").is_file() else {}
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        raise UserError(
            f"{path}: quantised ({method}), so its matrices are not those that were trained; {_UNQUANTISED}"
        )
    for ending in ("safetensors", "bin", "pt", "pth"):
        files = [file for file in _files(path, f"*.{ending}") if not file.name.startswith(_NOT_WEIGHTS)]
        indices = _files(path, f"*.{ending}.index.json")
        index = _json(indices[0]).get("weight_map") if indices else None
        if indices and not isinstance(index, dict):
            raise UserError(f"{indices[0]}: has no weight_map; it should name the file of each tensor")
        shards = [path / str(file) for file in sorted(set(index.values()))] if index else []
        if whole := [file for file in files if file.name in _WHOLE and file not in shards]:
            if others := [file for file in shards if file.parent == path and file.is_file()]:
                raise UserError(
                    f"{path}: has both {whole[0].name} and {others[0].name}, which {indices[0].name} names; transformers loads "
                    "the first alone, whichever is newer; remove what is older"
                )
            files, index = whole, None  # the index is of an earlier save
        elif index:
            files = shards
            if missing := [file for file in files if file.parent != path or not file.is_file()]:
                raise UserError(f"{missing[0]}: not there, but {indices[0].name} names it")
        if files:
            return _of_files(path.resolve().name, files, config, index)
    raise UserError(f"{path}: no weights in it; {_GIVE}")


def _files(folder: Path, pattern: str) -> list[Path]:
    return [file for file in sorted(folder.glob(pattern)) if file.is_file()]


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    if not isinstance(read, dict):
        raise UserError(f"{file}: should be a JSON object, with names and values")
    return read


def _of_files(name: str, files: list[Path], config: Mapping[str, Any], index: Mapping[str, str] | None) -> Tensors:
    """One model from files of tensors. `index`: the file that each tensor should be in, by the tensor's name."""
    entries: dict[str, Entry] = {}
    for file in files:
        found = _of_safetensors(file) if file.suffix == ".safetensors" else _entries(_load_pickled(file))
        if twice := entries.keys() & found.keys():
            raise UserError(
                f"{file}: {min(twice)} is in another file of the folder too, and no index says which counts"
            )
        for key, entry in found.items():
            if (
                (entry.dtype.itemsize == 1 and key.endswith("weight"))
                or key.endswith(_QUANTISED)
                or ".quant_state" in key
            ):
                raise UserError(f"{file}: {key} is quantised; {_UNQUANTISED}")
        entries |= found
    if missing := (index or {}).keys() - entries.keys():
        raise UserError(f"{name}: its index names {min(missing)}, which is in none of its files")
    return Tensors(name, _of_model(name, entries), config)


def _of_model(name: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries by their names in the model itself, without what wrappers insert."""
    cleaned: dict[str, Entry] = {}
    for key, entry in entries.items():
        if cleaned.setdefault(clean_name(key), entry) is not entry:
            raise UserError(f"{name}: has {clean_name(key)} twice, once as of a compiled model; remove one of them")
    return cleaned


def _of_safetensors(file: Path) -> dict[str, Entry]:
    with _opened(file) as shard:
        parts = {key: shard.get_slice(key) for key in shard.keys()}
        return {
            key: Entry(_DTYPES.get(part.get_dtype(), torch.uint8), tuple(part.get_shape()), partial(_load, file, key))
            for key, part in parts.items()
        }


def _opened(file: Path):
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: not a safetensors file, or cut off ({error})") from None


def _load(file: Path, key: str) -> Tensor:
    with _opened(file) as shard:  # opened anew, so that tensors read before do not stay in memory
        return shard.get_tensor(key)


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """The entries of tensors in memory. A tensor under two names, as with tied weights, counts once."""
    seen: dict[tuple, str] = {}
    for key, tensor in tensors.items():
        if tensor.is_sparse or tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise UserError(f"{key} {list(tensor.shape)} has more values than are stored")
        seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (key,), key)
    return {
        key: Entry(tensors[key].dtype, tuple(tensors[key].shape), partial(tensors.__getitem__, key))
        for key in seen.values()
    }


def _load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, memory-mapped where the file allows it."""
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{file}: holds more than tensors, or is damaged; reading it could run code. Save model.state_dict() alone"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{file}: not a torch file, or cut off ({str(error).splitlines()[0]})") from None
    for key in ("state_dict", "model", "module"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)} if isinstance(state, dict) else {}
    if not tensors:
        raise UserError(f"{file}: no tensors by name in it; save model.state_dict()")
    return tensors


def _checkpoint(tensors: Tensors) -> Checkpoint:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, entries, config = tensors
    model = skeleton.build({key: (entry.dtype, entry.shape) for key, entry in entries.items()}, config)
    return Checkpoint(name, model, lambda key: entries[key].load().to(device))


def _merged(path: Path, base: Path | None) -> Tensors:
    """A LoRA adapter with the model that it changes: W + (alpha / r) B A, and its whole weights in place of the model's."""
    config = _plain_lora(path)
    base = base or Path(str(config.get("base_model_name_or_path")))
    if not base.is_dir():
        raise UserError(f"{path}: an adapter without its base model; give the base's folder by --base")
    model = _read(base, None)
    files = [file for ending in ("safetensors", "bin") for file in _files(path, f"adapter_model.{ending}")]  # as PEFT
    if not files:
        raise UserError(f"{path}: no adapter_model.safetensors in it")
    found = _of_files(path.name, files[:1], {}, None).entries
    adapter = {key.removeprefix("base_model.model."): entry for key, entry in found.items()}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    transposed = bool(config.get("fan_in_fan_out"))
    whole, merged = {str(name) for name in config.get("modules_to_save") or ()}, dict(model.entries)
    for key, entry in adapter.items():
        module, _, rest = key.rpartition(".lora_A." if ".lora_A." in key else ".lora_B.")
        a, b = (adapter.get(f"{module}.lora_{which}.{rest}") for which in "AB")
        weight = model.entries.get(f"{module}.weight")
        if weight and a and b and weight.shape == (b.shape[0], a.shape[1])[:: -1 if transposed else 1]:
            merged[f"{module}.weight"] = Entry(
                torch.float32, weight.shape, partial(_sum, weight, a, b, scale, transposed)
            )
        elif key in model.entries or whole.intersection(key.split(".")):
            merged[key] = entry
        elif not key.endswith("bias"):
            raise UserError(f"{path}: {key} is not of {base}; save the model after PEFT's merge_and_unload()")
    return Tensors(f"{model.name} with {path.resolve().name}", merged, model.config)


def _plain_lora(path: Path) -> dict[str, Any]:
    """The settings of an adapter that is its factors and nothing else."""
    config = _json(path / "adapter_config.json")
    is_plain = config.get("peft_type") == "LORA" and config.get("r") and "lora_alpha" in config
    more = ("use_dora", "rank_pattern", "alpha_pattern", "layer_replication")
    if not is_plain or any(map(config.get, more)) or config.get("init_lora_weights", True) not in _FACTORS_ONLY:
        raise UserError(f"{path}: an adapter other than plain LoRA; save the model after PEFT's merge_and_unload()")
    return config


def _sum(weight: Entry, a: Entry, b: Entry, scale: float, transposed: bool) -> Tensor:
    change = b.load().float() @ a.load().float()
    return weight.load().float() + scale * (change.mT if transposed else change)

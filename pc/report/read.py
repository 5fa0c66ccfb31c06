"""A checkpoint on disk: names and shapes first, tensors one at a time. Nothing in it is executed."""

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pc.errors import UserError
from pc.report import skeleton

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"C64": torch.complex64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "BOOL": torch.bool}
_QUANTISED = (".qweight", ".SCB", ".absmax", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")  # beside the weights of a Trainer
_GIVE = "give a folder with safetensors or .bin files, a .safetensors file, or a .pt file of a state dict"

Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Checkpoint:
    name: str
    model: nn.Module
    """without values"""
    load: Callable[[str], Tensor]
    """a tensor by its name in `model`"""


def of_tensors(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = {}) -> Checkpoint:
    """Tensors in memory by their names. One that is there under two names, as where weights are tied, counts once."""
    seen: dict[tuple, str] = {}
    for key, tensor in tensors.items():
        seen.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (key,), key)
    described = {key: (tensors[key].dtype, tuple(tensors[key].shape)) for key in seen.values()}
    return _checkpoint(name, described, config, lambda key: tensors[key])


def read(path: Path, base: Path | None = None) -> Checkpoint:
    """A folder as transformers writes it, or a file of tensors.

    Args:
        base: folder of the model that an adapter changes; default: what the adapter itself names, if it is here.

    Raises:
        UserError: nothing there that can be read without running code, damaged files, quantised weights.
    """
    if not path.exists():
        raise UserError(f"{path}: not there; {_GIVE}. Models of the Hub are not fetched: `hf download NAME` does it")
    if path.is_file():
        return _of_files(path.name, [path], {}, None)
    if (path / "adapter_config.json").exists():
        return _merged(path, base)
    if (path / ".metadata").exists():
        raise UserError(
            f"{path}: a distributed checkpoint; of a run of this recipe use `scripts/spectra.py RUN --report`, else convert it "
            "with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch`"
        )
    config = _json(path / "config.json") if (path / "config.json").exists() else {}
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        raise UserError(
            f"{path}: quantised ({method}), so its matrices are not those that were trained; {_UNQUANTISED}"
        )
    for ending in ("safetensors", "bin", "pt", "pth"):
        files = [file for file in sorted(path.glob(f"*.{ending}")) if not file.name.startswith(_NOT_WEIGHTS)]
        indices = sorted(path.glob(f"*.{ending}.index.json"))
        index = _json(indices[0]).get("weight_map") if indices else None
        if indices and not isinstance(index, dict):
            raise UserError(f"{indices[0]}: has no weight_map; it should name the file of each tensor")
        if index:
            files = [path / str(file) for file in sorted(set(index.values()))]
            if missing := [file for file in files if file.parent != path or not file.is_file()]:
                raise UserError(f"{missing[0]}: not there, but {indices[0].name} names it")
        if files:
            return _of_files(path.resolve().name, files, config, index)
    raise UserError(f"{path}: no weights in it; {_GIVE}")


_UNQUANTISED = "give the weights in bfloat16, float16 or float32 that it was made from"


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    if not isinstance(read, dict):
        raise UserError(f"{file}: should be a table of names and values")
    return read


def _of_files(name: str, files: list[Path], config: Mapping[str, Any], index: Mapping[str, str] | None) -> Checkpoint:
    """Files of tensors, as one model. `index`: the name of the file that should have each tensor."""
    if any(file.suffix != ".safetensors" for file in files):
        tensors: dict[str, Tensor] = {}
        for file in files:
            state = _load_pickled(file)
            _require_new(tensors.keys() & state.keys(), file)
            tensors |= state
        _require_all(index, tensors.keys(), name)
        _require_plain(name, {key: str(tensor.dtype) for key, tensor in tensors.items()})
        return of_tensors(name, tensors, config)
    described: Described = {}
    file_of: dict[str, Path] = {}
    for file in files:
        with _opened(file) as shard:
            names = shard.keys()
            _require_new(file_of.keys() & set(names), file)
            dtypes = {key: shard.get_slice(key).get_dtype() for key in names}
            _require_plain(str(file), dtypes)
            for key in names:
                described[key] = (_DTYPES.get(dtypes[key], torch.uint8), tuple(shard.get_slice(key).get_shape()))
                file_of[key] = file
    _require_all(index, file_of.keys(), name)

    def load(key: str) -> Tensor:
        with _opened(file_of[key]) as shard:  # opened anew, so that what was read before does not stay in memory
            return shard.get_tensor(key)

    return _checkpoint(name, described, config, load)


def _opened(file: Path):
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file}: not a safetensors file, or cut off ({error})") from None


def _load_pickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, mapped into memory where the file can be."""
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
        raise UserError(f"{file}: not a file of torch, or cut off ({str(error).splitlines()[0]})") from None
    for key in ("state_dict", "model", "module"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    tensors = {str(k): v for k, v in state.items() if isinstance(v, Tensor)} if isinstance(state, dict) else {}
    if not tensors:
        raise UserError(f"{file}: no tensors by name in it; save model.state_dict()")
    return tensors


def _require_new(twice: set[str], file: Path) -> None:
    if twice:
        raise UserError(f"{file}: {min(twice)} is in another file of the folder too, and no index says which counts")


def _require_all(index: Mapping[str, str] | None, names, folder: str) -> None:
    if missing := (index or {}).keys() - names:
        raise UserError(f"{folder}: its index names {min(missing)}, which is in none of its files")


def _require_plain(file: str, dtypes: Mapping[str, str]) -> None:
    for key, dtype in dtypes.items():
        is_8_bit = dtype.lower().removeprefix("torch.").startswith(("f8", "float8"))
        is_packed = key.endswith(".weight") and dtype.lower().removeprefix("torch.") in ("i8", "u8", "int8", "uint8")
        if is_8_bit or is_packed or key.endswith(_QUANTISED) or ".quant_state" in key:
            raise UserError(f"{file}: {key} ({dtype.removeprefix('torch.')}) is quantised; {_UNQUANTISED}")


def _checkpoint(
    name: str, described: Described, config: Mapping[str, Any], load: Callable[[str], Tensor]
) -> Checkpoint:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Checkpoint(name, skeleton.build(described, config), lambda key: load(key).to(device))


def _merged(path: Path, base: Path | None) -> Checkpoint:
    """W + (alpha / r) B A of a LoRA adapter and the model that it changes."""
    config = _json(path / "adapter_config.json")
    base = base or Path(str(config.get("base_model_name_or_path")))
    if config.get("peft_type") != "LORA" or any(
        config.get(key) for key in ("use_dora", "rank_pattern", "alpha_pattern")
    ):
        raise UserError(f"{path}: an adapter other than plain LoRA; save the model after PEFT's merge_and_unload()")
    if not base.is_dir():
        raise UserError(f"{path}: an adapter, which is no model alone; name the folder of its base by --base")
    model = read(base)
    files = sorted(path.glob("adapter_model.*"))
    if not files:
        raise UserError(f"{path}: no adapter_model.safetensors in it")
    adapter = _of_files(path.name, files[:1], {}, None)
    known = dict(model.model.named_parameters())
    added = {}
    for key, a in adapter.model.named_parameters():
        if ".lora_A." not in key:
            continue
        target = key.split(".lora_A.")[0].removeprefix("base_model.model.") + ".weight"
        if target not in known:
            raise UserError(f"{path}: {key} changes {target}, which {base} does not have")
        added[target] = key
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])

    def load(name: str) -> Tensor:
        weight = model.load(name)
        if name not in added:
            return weight
        a, b = adapter.load(added[name]).float(), adapter.load(added[name].replace(".lora_A.", ".lora_B.")).float()
        change = (b @ a).mT if config.get("fan_in_fan_out") else b @ a
        return weight.float() + scale * change

    return replace(model, name=f"{model.name} with {path.resolve().name}", load=load)

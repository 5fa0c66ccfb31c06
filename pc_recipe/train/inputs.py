"""What decides a run's result beside its settings: this code, and the content of the files that its config names. Needs no
torch."""

import contextlib
import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from pc_recipe.config import Config
from pc_recipe.config.run_key import START, settings_key
from pc_recipe.files import look, record
from pc_recipe.files.atomic import sha256_of
from pc_recipe.files.record import Malformed
from pc_recipe.files.run_folder import CHECKSUMS

COMPUTES = ("pc", "pc_recipe/config", "pc_recipe/data", "pc_recipe/checkpoints", "pc_recipe/train")


def result_key(config: Config, world_size: int | None = None, data: dict[str, str] | None = None) -> dict[str, Any]:
    """What decides a run's result; of runs with equal ones, one is trained.

    Args:
        world_size: as of `settings_key`.
        data: `data_checksums` as they were at training; None: as they are now.
    """
    return settings_key(config, world_size) | (data_checksums(config) if data is None else data)


@cache
def code_version() -> dict[str, str]:
    """What computes a result: versions of torch and TorchTitan, and a checksum of the files that a step depends on."""
    checkout, digest = Path(__file__).parents[2], hashlib.sha256()
    files = [file for folder in COMPUTES for file in look.files_below(checkout / folder) if file.suffix == ".py"]
    for file in sorted(files):
        digest.update(f"{file.relative_to(checkout)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return {"torch": version("torch"), "torchtitan": version("torchtitan"), "files": digest.hexdigest()}


class _Checksums(TypedDict, total=False):
    """What is read of a manifest.json."""

    configuration_sha256: str
    content_sha256: str


def data_checksums(config: Config) -> dict[str, str]:
    """{key: checksum} of what can be read: the data (`Manifest.identity`), files of `[experiment]`, and the checkpoint that
    a new run starts from."""
    checksums = {}
    for key, folders in (("path", config.data.folders), ("validation_path", config.data.validation_folders)):
        # a missing or damaged manifest is reported when the data are opened
        with contextlib.suppress(Malformed, KeyError):
            manifests = [record.read(Path(folder, "manifest.json"), _Checksums) or {} for folder in folders]
            identities = (m.get("configuration_sha256") or m["content_sha256"] for m in manifests)
            checksums[f"content of data.{key}"] = ", ".join(identities)
    arm, options = config.experiment.arm.partition(":")[0], config.experiment.options
    files = {"arm": Path(__file__).parents[2] / f"{arm.replace('.', '/')}.py"}
    files |= {f"options.{name}": Path(value) for name, value in options.items() if isinstance(value, str)}
    named = {f"experiment.{name}": file for name, file in files.items()}
    if config.checkpoint.enable and config.checkpoint.initial_load_path:
        named[START] = Path(config.checkpoint.initial_load_path, CHECKSUMS)
    return checksums | {f"content of {key}": sha256_of(file) for key, file in named.items() if look.is_file(file)}

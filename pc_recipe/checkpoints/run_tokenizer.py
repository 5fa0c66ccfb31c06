"""The tokenizer that weights belong to: a run keeps it in its folder and names it in its checkpoints.

Weights load silently with another tokenizer of the same size, and are then worthless. So checksums are compared
wherever weights and a tokenizer meet: at a start, a resume, an export, when text is scored or generated.
"""

from contextlib import suppress
from pathlib import Path

from torchtitan.tools.logging import logger
from typing_extensions import TypedDict

from pc.errors import UserError
from pc_recipe.checkpoints.fingerprint import read_tokenizer
from pc_recipe.checkpoints.folder import CheckpointFolder
from pc_recipe.checkpoints.values import SavedTokenizer
from pc_recipe.config.schema import Data
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizer_formats import FILE
from pc_recipe.data.tokenizers import SENTENCEPIECE, Tokenizer, load_tokenizer
from pc_recipe.files import look, record
from pc_recipe.files.places import CONFIG, run_of
from pc_recipe.files.record import Malformed, Tables
from pc_recipe.files.run_folder import read_environment

FOLDER = "tokenizer"
THE_SAME = "checkpoint.initial_load_tokenizer_is_the_same = true"
Names = dict[str, str]
"""A tokenizer's "name" and "sha256"."""


def describe(manifest: Manifest) -> Names:
    """Name and checksum of a data folder's tokenizer, as written to checkpoints."""
    return {"name": manifest.tokenizer.name, "sha256": manifest.tokenizer_sha256()}


def keep(run: Path, manifest: Manifest) -> None:
    """Write the tokenizer of a run's data to its folder. Training needs none: one that cannot be loaded is a warning."""
    try:
        tokenizer = manifest.load_tokenizer()
    except UserError as error:
        logger.warning(f"{error}; no tokenizer is written to {run}; if it has none yet, exports will need --tokenizer")
        return
    tokenizer.save(run / FOLDER)


def of_run(checkpoint: CheckpointFolder, given: str | None = None) -> Tokenizer:
    """The tokenizer of a run's checkpoint.

    Args:
        given: the user's choice, as in `load_tokenizer`.

    Raises:
        UserError: it is gone, or is not the one that the checkpoint names.
    """
    run, saved = run_of(checkpoint.path), read_tokenizer(checkpoint)
    if given is None or not saved:
        try:
            own = load_tokenizer(run / FOLDER) if look.is_there(run / FOLDER) else data_of(run).load_tokenizer()
            saved = saved or own.names
        except UserError:
            if given is None:
                raise
    used, words = (own, f"{run / FOLDER} is") if given is None else (load_tokenizer(given), "--tokenizer is")
    if saved:
        require_equal(saved, used.names, f"{checkpoint.path} belongs to", words)
        used.name = saved["name"]
    return used


def data_folders(run: Path) -> list[Path]:
    """The folders that a run was trained on; raises a `UserError` if its config does not name them."""
    try:
        section = (record.read(run / CONFIG, Tables) or {}).get("data", {})
        return [Path(folder) for folder in Data(path=section.get("path", Data().path)).folders]
    except ValueError as error:
        raise UserError(f"{run}/config.toml: does not say which data it trained on ({error})".splitlines()[0]) from None


def data_of(run: Path, number: int = 0) -> Manifest:
    """The data of a run: folder `number`; the first has its tokenizer.

    Raises:
        UserError: they are gone, or replaced by others.
    """
    restore = "restore it, or export the checkpoint with scripts/export_hf.py --tokenizer TOKENIZER and use the export"
    folder = data_folders(run)[number]
    if not look.is_there(folder):
        raise UserError(f"{folder}: the run's data folder, which has its tokenizer, is missing; {restore}")
    manifest, known = Manifest.read(folder), (read_environment(run).get("data") or {}).get("content of data.path")
    if known and manifest.identity not in known.split(", "):
        raise UserError(f"{folder}: has other data than those that {run} was trained on; {restore}")
    return manifest


def require_equal(one: Names, other: Names, has: str, other_has: str) -> None:
    """Raise a `UserError` that names two tokenizers which differ; has, other_has: words in front of their names."""
    if one["sha256"] != other["sha256"]:
        names = [f"tokenizer {names['name']!r} ({names['sha256'][:12]})" for names in (one, other)]
        raise UserError(f"{has} {names[0]}, {other_has} {names[1]}")


def require_for_start(start: CheckpointFolder | Path, manifest: Manifest) -> None:
    """Raise a `UserError` unless the weights that a new run starts from belong to the tokenizer of its data.

    Args:
        start: what `checkpoint.initial_load_path` names, a checkpoint or a Hugging Face folder.
    """
    where, theirs = f"checkpoint.initial_load_path = {start if isinstance(start, Path) else start.path}", []
    try:
        names = read_tokenizer(start) if isinstance(start, CheckpointFolder) else exported_names(start)
        if names is None:
            theirs = [of_run(start)] if isinstance(start, CheckpointFolder) else _of_hugging_face(start)
            names = theirs[0].names
    except UserError as error:
        raise UserError(
            f"{where}: its tokenizer is not known ({error}); if it is that of the data, set {THE_SAME}"
        ) from None
    own = describe(manifest)
    if names["sha256"] == own["sha256"] or any(one.gives_the_ids_of(manifest.load_tokenizer()) for one in theirs):
        return
    require_equal(names, own, f"{where} belongs to", f"{manifest.folder} was made with")


class _ExportedConfig(TypedDict):
    """What the config.json of an export has beside the model's keys."""

    tokenizer: SavedTokenizer


def exported_names(folder: Path) -> Names | None:
    """What the config.json of an export says of its tokenizer; None for another folder."""
    with suppress(Malformed):
        config = record.read(folder / "config.json", _ExportedConfig)
        return config and config["tokenizer"]
    return None


def _of_hugging_face(folder: Path) -> list[Tokenizer]:
    """Both forms of its tokenizer, if present; Llama 2's give different ids for runs of spaces."""
    found = [path for path, file in ((folder, FILE), (folder / SENTENCEPIECE, "")) if look.is_there(path / file)]
    if not found:
        raise UserError(f"no {FILE} beside the weights")
    return [load_tokenizer(path) for path in found]

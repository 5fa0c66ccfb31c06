"""A tokenising job: its settings, its units, and which units are finished.

The settings alone determine the units, their order and, within one version of this code, every byte of the result. Each
finished unit writes `units/NNNNN.json` after its shards. The process that finds all of these, and their shards with the
right sizes, writes the manifest.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from pc.errors import UserError
from pc_recipe.data.manifest import (
    FORMAT,
    SPLITS,
    TOKENIZER_FOLDER,
    Manifest,
    Size,
    SourceFile,
    TokenizerRecord,
    TokenShard,
)
from pc_recipe.data.sources import (
    Unit,
    divide_into_units,
    find_files,
    find_local_files,
    has_text,
    measure_files,
    read_texts,
    size_of,
    unique,
)
from pc_recipe.data.text_files import HUB, LONGEST
from pc_recipe.data.token_files import remove_leftovers, require_file
from pc_recipe.data.tokenizers import Tokenizer, load_tokenizer, smallest_dtype
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.errors import ReadFailed
from pc_recipe.files.inside import require_plain

VALIDATION_SHARE = 0.0005  # of the documents, by default; of small data more:
VALIDATION_BYTES = 2 * 10**6  # of text, some 500,000 tokens: 64 sequences of 8192, more than 1 % of 200 MB
MOST_VALIDATION = 0.1
COMPARED = 200  # texts, which a converted tokenizer and its original encode before any are stored
DOCUMENT_BYTES = 3000  # roughly, of a document in a data set such as FineWeb


class _Settings(TypedDict):
    """The settings that are read again; a command's own are compared with those that the folder was started with."""

    format: Literal[1, 2]
    sources: list[str]
    tokenizer: str
    subset: str | None
    text_key: str
    max_documents: Size | None
    validation_share: Annotated[float, Field(ge=0, le=1)]
    files: list[SourceFile]
    left_out: NotRequired[dict[str, Size]]


@dataclass(frozen=True)
class _Saved:
    """Content of tokenizing.json."""

    settings: _Settings
    units: list[Unit]
    modified: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizingJob:
    """What a tokenising command does in `output`."""

    output: Path
    settings: dict
    """All that determines the result."""
    tokenizer: TokenizerRecord
    units: list[Unit]
    modified: dict[str, int]
    """{local file: its `_last_change` when the job began}; empty once all is tokenised."""
    fast: bool = False
    """Whether this command encodes by fastokens."""

    def require_unmodified(self, files: Iterable[str]) -> None:
        """Raise a `UserError` for a local file that was changed since the job began; a deleted one is accepted."""
        for file in files:
            if (now := _last_change(file)) and now != self.modified.get(file, now):
                raise UserError(
                    f"{file} was changed after {self.output} was started; the shards would mix both; choose another --output"
                )

    @property
    def sha256(self) -> str:
        """The checksum of the settings."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()


def open_job(output: Path, sources: list[str], tokenizer: Tokenizer, requested: dict) -> TokenizingJob:
    """Read the folder's job, or create one from the sources.

    Args:
        requested: the command's settings by name.

    Raises:
        UserError: a setting or the sources' files are not those of the folder's job, or the converted tokenizer gives other
            ids for the first texts than its original.
    """
    require_plain(output)
    requested = {"sources": sources, "tokenizer": tokenizer.sha256} | requested
    path = output / "tokenizing.json"
    if (text := look.read(path)) is not None:
        try:
            saved = TypeAdapter(_Saved).validate_json(text, strict=True)
        except ValidationError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} is damaged ({reason}); delete {output}, and repeat the command") from None
        settings, units = json.loads(text)["settings"], saved.units  # all keys: the checksum covers them
        # a job of format 1 has another checksum of it in its settings
        before = settings | {"tokenizer": load_tokenizer(output / TOKENIZER_FOLDER).sha256}
        for key, value in requested.items():
            if before.get(key) != value:
                raise UserError(
                    f"{output} was started with {key} = {before.get(key)!r}, this command has "
                    f"{value!r}: choose another --output, or delete the folder"
                )
        _require_same_files(sources, settings, units, output)
        modified = {} if look.is_there(output / "manifest.json") else saved.modified
    else:
        settings, units = _divide_source(sources, output, requested)
        for unit in units[:1]:
            first = islice(read_texts(unit, requested["text_key"], Counter(), Counter()), COMPARED)
            texts = [text[:LONGEST] for text in first]
            tokenizer.require_equal(texts)
            if changed := tokenizer.count_changed(texts):
                settings["left_out"][f"documents in part, by the tokenizer (of the first {COMPARED})"] = changed
        tokenizer.save(output / TOKENIZER_FOLDER)
        modified = {file: now for unit in units for file in unit.groups if (now := _last_change(file))}
        content = {"settings": settings, "units": [asdict(unit) for unit in units], "modified": modified}
        write_atomically(path, json.dumps(content, indent=1))
    record = replace(TokenizerRecord.of(tokenizer), sha256=settings["tokenizer"])
    job = TokenizingJob(output, settings, record, units, modified)
    job.require_unmodified(modified)
    return job


def _last_change(file: str) -> int:
    """A local file's modification time in nanoseconds; else 0."""
    return os.stat(file).st_mtime_ns if look.is_there(file) else 0


def _divide_source(sources: list[str], output: Path, requested: dict) -> tuple[dict, list[Unit]]:
    left_out = Counter[str]()
    names = find_files(sources, left_out, requested["subset"], output)
    unit_bytes: float = requested["shard_megabytes"] * 10**6
    if requested["max_documents"]:
        left_out["behind the first, for --max-documents"] += len(names) - 1
        names, unit_bytes = names[:1], math.inf
    files = measure_files(names, requested["text_key"])
    left_out["empty"] += sum(not file.groups for file in files)
    units = divide_into_units(files, unit_bytes)
    text_bytes = sum(unit.text_bytes for unit in units)
    share = requested["validation_fraction"]
    if share is None:
        share = validation_share(min(text_bytes, DOCUMENT_BYTES * (requested["max_documents"] or text_bytes)))
    settings = {
        "validation_share": share,
        "files": [{"name": file.file.rsplit("/", 1)[-1], "size": file.size} for file in files],
        "left_out": dict(+left_out),
    }
    return {"format": FORMAT} | requested | settings, units


def validation_share(text_bytes: int) -> float:
    """The share of documents for validation by default: small data give more, up to a tenth."""
    return max(VALIDATION_SHARE, min(MOST_VALIDATION, VALIDATION_BYTES / max(1, text_bytes)))


def _require_same_files(sources: list[str], settings: dict, units: list[Unit], output: Path) -> None:
    """Compare names and sizes of local files with the job's. Once tokenised, they may all be gone.

    The job, perhaps someone else's, may name no file outside `sources`.
    """
    found = [find_local_files(source, settings["subset"], output, Counter()) for source in sources]
    paths = [path for path in unique(path for files in found for path in files or ()) if has_text(path)]
    of_hub = tuple(f"{HUB}datasets/{source}@" for source in sources)
    for file in {file for unit in units for file in unit.groups}.difference(paths):
        if not file.startswith(of_hub) and (file.startswith(HUB) or look.is_there(file)):
            raise UserError(
                f"{output / 'tokenizing.json'} names {file!r}, which is not in {' '.join(sources)}, or is now left out"
            )
    if None in found:
        return
    if settings["max_documents"]:
        paths = paths[:1]
    present = Counter((Path(path).name, size_of(path)) for path in paths)  # two files may have the same name and size
    known = Counter((file["name"], file["size"]) for file in settings["files"])
    changed = sorted((present - known) + (known - present))
    if present and changed:
        raise UserError(
            f"{output} was started with other files of {' '.join(sources)}: {changed[0][0]} is new, changed or gone; "
            "choose another --output"
        )


def record_unit(job: TokenizingJob, unit: Unit, record: "UnitRecord") -> None:
    """Mark the unit as finished, after its shards are written."""
    write_atomically(_record_path(job, unit), json.dumps(asdict(record), indent=1))


def _record_path(job: TokenizingJob, unit: Unit) -> Path:
    return job.output / "units" / f"{unit.number:05d}.json"


@dataclass(frozen=True)
class UnitRecord:
    """units/NNNNN.json, of a finished unit."""

    settings_sha256: str
    """Of the settings with which it was made."""
    shards: dict[str, list[TokenShard]]
    replaced: dict[str, Size]
    """{file: bytes that are not UTF-8}"""
    left_out: dict[str, Size] = field(default_factory=dict)
    """{reason: number of documents}; earlier versions left none out"""


_RECORD = TypeAdapter(UnitRecord)


def read_finished(job: TokenizingJob, unit: Unit) -> UnitRecord | None:
    """The unit's record if it was finished with these settings and no file is missing, else None."""
    text = look.read(_record_path(job, unit))
    try:
        record = _RECORD.validate_json(text or b"", strict=True)
        if record.settings_sha256 != job.sha256:
            return None
        for shard in (*record.shards["train"], *record.shards["validation"]):
            require_file(job.output, shard)
    except ReadFailed:
        raise
    except (ValueError, KeyError):
        return None
    return record


def write_manifest_if_finished(job: TokenizingJob) -> Manifest | None:
    """Write the manifest if all units are finished, else return None.

    Raises:
        UserError: the sources have no documents.
    """
    records = [record for unit in job.units if (record := read_finished(job, unit))]
    if len(records) < len(job.units):
        return None
    settings = job.settings
    shards = {split: [shard for record in records for shard in record.shards[split]] for split in SPLITS}
    if not any(shards.values()):
        raise UserError(f"--input {' '.join(settings['sources'])}: there is no text in it")
    for split in SPLITS:
        remove_leftovers(job.output / split)
    source: Any = {"input": " ".join(settings["sources"])}
    source |= {key: settings[key] for key in ("subset", "text_key", "max_documents", "files")}
    left_out = sum((Counter(record.left_out) for record in records), Counter(settings.get("left_out", {})))
    source |= {"left_out": dict(left_out)}
    source |= {"replaced": dict(sum((Counter(record.replaced) for record in records), Counter()))}
    manifest = Manifest(
        folder=job.output,
        format=settings["format"],
        dtype=smallest_dtype(job.tokenizer.vocab_size),
        source=source,
        split_rule=f"validation if blake2b-64(text) / 2^64 < {settings['validation_share']:.6g}, else train",
        tokenizer=job.tokenizer,
        shards=shards,
        configuration_sha256=job.sha256 if settings["format"] == 1 else "",
    )
    manifest.write()
    return manifest

"""The plan of a tokenising run: its settings, its units, and which units are finished.

The settings alone determine the units, their order and every byte of the result. Each finished unit
writes `units/NNNNN.json` after its shards have been verified. The process that finds all of them
writes the manifest.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pc.common.files import write_atomically
from pc.data.manifest import FORMAT, SPLITS, TOKENIZER_FOLDER, Manifest, Shard, TokenizerRecord
from pc.data.shards import size_complaint, smallest_dtype
from pc.data.sources import Unit, find_files, find_local_files, plan_units, read_footers, size_of
from pc.data.tokenizers import Tokenizer
from pc.errors import UserError


@dataclass(frozen=True)
class TokenizingPlan:
    """configuration: all settings that determine the result. units: the units of work."""

    configuration: dict
    configuration_sha256: str
    tokenizer: TokenizerRecord
    dtype: str
    units: list[Unit]


def make_plan(
    source: str,
    subset: str | None,
    source_name: str | None,
    tokenizer: Tokenizer,
    text_column: str,
    validation_fraction: float,
    shard_megabytes: int,
    output: Path,
) -> TokenizingPlan:
    """Read the folder's plan, or create one from the source.

    Raises:
        UserError: a setting is out of range, or it or the source's files are not those of the folder's plan.
    """
    if not 0 <= validation_fraction < 1:
        raise UserError(f"--validation-fraction {validation_fraction} must be at least 0 and less than 1")
    if shard_megabytes < 1:
        raise UserError(f"--shard-megabytes {shard_megabytes} must be at least 1")
    requested = {
        "format": FORMAT,
        "source": source_name or source,
        "subset": subset,
        "text_column": text_column,
        "tokenizer": tokenizer.sha256,
        "validation_fraction": validation_fraction,
        "shard_megabytes": shard_megabytes,
    }
    path = output / "plan.json"
    if path.is_file():
        try:
            saved = json.loads(path.read_text())
            configuration, units = saved["configuration"], [Unit(**unit) for unit in saved["units"]]
            planned = [(file["name"], file["size"]) for file in configuration["files"]]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); delete {output} and start again") from error
        for key, value in requested.items():
            if configuration.get(key) != value:
                raise UserError(
                    f"{output} was started with {key} = {configuration.get(key)!r}, this command has "
                    f"{value!r}: choose another --output, or delete the folder"
                )
        _require_same_files(source, planned, output)
    else:
        files = read_footers(find_files(source, subset), text_column)
        configuration = requested | {"files": [file.summary() for file in files]}
        units = plan_units(files, shard_megabytes * 10**6)
        for name, content in tokenizer.files.items():
            write_atomically(output / TOKENIZER_FOLDER / name, content)
        write_atomically(
            path, json.dumps({"configuration": configuration, "units": [asdict(u) for u in units]}, indent=1)
        )
    digest = hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()
    return TokenizingPlan(
        configuration,
        digest,
        TokenizerRecord.of(tokenizer),
        smallest_dtype(tokenizer.vocab_size),
        units,
    )


def _require_same_files(source: str, planned: list[tuple[str, int]], output: Path) -> None:
    """Compare names and sizes of the files with the plan's. Files on the Hub are pinned to a revision; local ones may
    be gone, all of them, once they are tokenised."""
    inside = output.resolve()  # the output may lie in the input's folder
    paths = [Path(file) for file in find_local_files(source) or [] if inside not in Path(file).resolve().parents]
    found = [(path.name, size_of(str(path))) for path in paths]
    if not found or found == planned:
        return
    sizes = dict(planned)
    for (name, size), path in zip(found, paths, strict=True):
        if (name, size) not in planned:
            change = f"{path} has {size:,} bytes, then it had {sizes[name]:,}" if name in sizes else f"{path} is new"
            break
    else:
        gone = [name for name, size in planned if (name, size) not in found]
        change = f"{gone[0]} is gone" if gone else "their number or order has changed"
    raise UserError(f"{output} was started with other files of {source}: {change}; choose another --output")


def record_unit(output: Path, plan: TokenizingPlan, unit: Unit, shards: dict[str, list[Shard]]) -> None:
    """Mark the unit as finished, after its shards are written and verified."""
    record = {
        "configuration_sha256": plan.configuration_sha256,
        "shards": {split: [asdict(shard) for shard in shards[split]] for split in SPLITS},
    }
    write_atomically(_record_path(output, unit), json.dumps(record, indent=1))


def _record_path(output: Path, unit: Unit) -> Path:
    return output / "units" / f"{unit.number:05d}.json"


def finished(output: Path, plan: TokenizingPlan, unit: Unit) -> dict[str, list[Shard]] | None:
    """The unit's shards if it was finished with this configuration and no file is missing, else None."""
    try:
        record = json.loads(_record_path(output, unit).read_text())
        if record["configuration_sha256"] != plan.configuration_sha256:
            return None
        shards = {split: [Shard(**shard) for shard in record["shards"][split]] for split in SPLITS}
    except (OSError, json.JSONDecodeError, KeyError, TypeError):
        return None
    complaints = [size_complaint(output, shard) for split in SPLITS for shard in shards[split]]
    return None if any(complaints) else shards


def finish(output: Path, plan: TokenizingPlan) -> Manifest | None:
    """Write the manifest if all units are finished, else return None."""
    records = [finished(output, plan, unit) for unit in plan.units]
    if any(record is None for record in records):
        return None
    configuration = plan.configuration
    manifest = Manifest(
        folder=output,
        dtype=plan.dtype,
        source={"input": configuration["source"]} | {k: configuration[k] for k in ("subset", "text_column", "files")},
        split_rule=f"validation if blake2b-64(text) / 2^64 < {configuration['validation_fraction']}, else train",
        configuration_sha256=plan.configuration_sha256,
        tokenizer=plan.tokenizer,
        shards={split: [shard for record in records for shard in record[split]] for split in SPLITS},
    )
    manifest.write()
    return manifest

"""Which final losses can be compared: those of one text and tokenizer, in the same sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pc.errors import UserError
from pc_recipe.config import Config, read_config
from pc_recipe.files.run_folder import read_parts

TEXT, VALIDATION_TEXT = "content of data.path", "content of data.validation_path"
"""Names of checksums in environment.json."""


def find_others(key: str, runs: Sequence[Path]) -> list[Path]:
    """The runs that have another checksum `key` than the first, as far as both have recorded one. A part of a run may have
    one of its own."""
    parts = {run: [part.get("data") or {} for part in read_parts(run)] for run in runs}
    found = {run: {part[key] for part in of_run if key in part} for run, of_run in parts.items()}
    first = found[runs[0]] if runs else set()
    return [run for run, checksums in found.items() if first and checksums and checksums != first]


def sequences_of(config: Config) -> dict[str, Any]:
    """What decides the sequences of a validation, beside its text."""
    return {
        "training.seq_len": config.training.seq_len,
        "data.validation_sequences": config.data.validation_sequences,
        "weights of data.validation_path": [*config.data.validation_folders.values()],
    }


def require_same_text(runs: Sequence[Path]) -> None:
    """Raise a `UserError` if a run was validated on other text than the first, or with another tokenizer."""
    for run in find_others(VALIDATION_TEXT, runs):
        raise UserError(
            f"{run} was validated on other text than {runs[0]}, or with another tokenizer, so their losses cannot be compared; "
            "compare runs with one data.validation_path"
        )


def require_same_sequences(runs: Sequence[Path]) -> None:
    """Raise a `UserError` if a run was validated on other sequences than the first, as far as their folders say."""
    known = {run: sequences_of(config) for run in runs if (config := read_config(run)) is not None}
    first = next(iter(known), Path())
    for run, values in known.items():
        for key in [key for key in values if values[key] != known[first][key]]:
            raise UserError(
                f"{run} was validated on other sequences than {first}, so their losses cannot be compared; compare runs with "
                f"one {key}, not {known[first][key]} and {values[key]}"
            )

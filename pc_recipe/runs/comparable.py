"""Which final losses can be compared: those of one text and tokenizer, in the same sequences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pc.errors import UserError
from pc_recipe.config import Config, read_config
from pc_recipe.files.run_folder import read_parts


def differ(key: str, first: Path, other: Path) -> bool:
    """Whether both runs have recorded the checksum `key`, and one has a checksum that the other lacks."""
    parts = [[part.get("data") or {} for part in read_parts(run)] for run in (first, other)]
    one, two = ({part[key] for part in some if key in part} for some in parts)
    return bool(one and two) and one != two


def sequences_of(config: Config) -> dict[str, Any]:
    """What decides the sequences of a validation, beside its text."""
    return {
        "training.seq_len": config.training.seq_len,
        "data.validation_sequences": config.data.validation_sequences,
        "weights of data.validation_path": [*config.data.validation_folders.values()],
    }


def require_same_text(runs: Sequence[Path]) -> None:
    """Raise a `UserError` if a run was validated on other text than the first, or with another tokenizer."""
    for run in runs[1:]:
        if differ("content of data.validation_path", runs[0], run):
            raise UserError(
                f"{run} was validated on other text than {runs[0]}, or with another tokenizer, so their losses cannot be "
                "compared; compare runs with one data.validation_path"
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

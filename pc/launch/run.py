"""One training run, as launchers pass it on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A config, the words that change it, and where it writes."""

    name: str
    config: str
    overrides: tuple[str, ...]
    """words of the command line; they set the run's folder too"""
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """{"section.key": value} that a sweep's axes set"""
    seed: int | None = None

    @property
    def setting_name(self) -> str:
        """The name without the seed: equal for runs that are repeats of each other."""
        return self.name.rpartition("/seed-")[0] if self.seed is not None else self.name

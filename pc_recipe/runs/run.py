"""One training run, as passed between launchers."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pc_recipe.config import Config, load_config


@dataclass(frozen=True)
class Run:
    """A config, its overrides, and its folder."""

    name: str
    config: str
    overrides: tuple[str, ...]
    """Arguments of the command line, including the run's folder."""
    folder: Path
    seed: int | None = None
    """Its seed in a sweep."""
    settings: dict[str, Any] = field(default_factory=dict)
    """{"section.key": value} of the keys that differ between the runs of a sweep."""

    variant: str = ""
    """The name of the sweep's variant."""

    @cached_property
    def resolved(self) -> Config:
        return load_config(self.config, self.overrides)

    @property
    def setting_name(self) -> str:
        """The name without the seed: equal for runs that are repeats of each other."""
        return self.name.rpartition("/seed-")[0] if self.seed is not None else self.name

"""The only file that names TorchTitan's configuration classes: makes its JobConfig of a run's `Config`."""

from typing import Any

import torchtitan.config.job_config as titan

from pc_recipe.config import Config
from pc_recipe.config.sections import Section


class JobConfig(titan.JobConfig):
    """TorchTitan's sections and keys with a run's values, and this project's own ones beside them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._values = config.model_dump()
        _set(self, config)

    def to_dict(self) -> dict[str, Any]:
        """For TorchTitan's loggers."""
        return self._values


def _set(section: Any, values: Section) -> None:
    for name in type(values).model_fields:
        value, upstream = getattr(values, name), getattr(section, name, None)
        if isinstance(value, Section) and upstream is not None:
            _set(upstream, value)
        else:
            setattr(section, name, value)

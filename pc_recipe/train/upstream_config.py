"""TorchTitan's configuration, made of a run's `Config` where TorchTitan is called. Only this file names its classes.

TorchTitan hands its configuration, or a section of it, to the functions of a TrainSpec (`pc_recipe.train.train_spec`),
which need the run's: the attribute `ours`.
"""

from typing import Any

import torchtitan.config.job_config as titan

from pc_recipe.config import Config
from pc_recipe.config.sections import Section


class JobConfig(titan.JobConfig):
    """TorchTitan's sections and keys with a run's values."""

    ours: Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model.hf_assets_path = ""  # its default is a folder of TorchTitan's checkout, which a warning would name
        _set(self, config)
        if not config.compiles_loss:
            self.compile.components = [part for part in config.compile.components if part != "loss"]

    def to_dict(self) -> dict[str, Any]:
        """For TorchTitan's loggers."""
        return self.ours.model_dump()


def _set(upstream: Any, ours: Section) -> None:
    upstream.ours = ours
    for name in type(ours).model_fields:
        value = getattr(ours, name)
        if isinstance(value, Section) and hasattr(upstream, name):
            _set(getattr(upstream, name), value)
        elif hasattr(upstream, name):
            setattr(upstream, name, value)

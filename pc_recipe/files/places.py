"""Where things lie in a run's folder; what they are: `pc_recipe.files.run_folder`."""

from pathlib import Path

CONFIG = "config.toml"
"""The configuration of a run, by which its folder is known."""
ENVIRONMENT = "environment.json"
PENDING = "pending.toml"
"""The configuration of a start, until nothing refuses it; then it becomes config.toml."""


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints, under TorchTitan's name. It may be a link to a larger disk."""
    return run / "checkpoint"


def run_of(checkpoint: Path) -> Path:
    """The run of a checkpoint RUN/checkpoint/step-N."""
    return checkpoint.parent.parent

"""Programs and packages that a run needs on this machine."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from pc.errors import UserError
from pc_recipe.config import Config
from pc_recipe.files import look


def require_wandb(config: Config) -> None:
    """Raise a `UserError` if the package is missing: TorchTitan would train without it and log nothing there."""
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        raise UserError("metrics.enable_wandb = true needs the package: pip install wandb, or use false")


def require_compiler(config: Config) -> None:
    """Triton builds its driver with a C compiler; on a CPU, inductor builds its kernels with a C++ compiler.

    Raises:
        UserError: the config compiles, and there is no compiler.
    """
    if not config.compile.enable:
        return
    import torch  # takes seconds

    names = [os.environ.get("CC", "gcc"), "clang"] if torch.cuda.is_available() else [os.environ.get("CXX", "g++")]
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not any(shutil.which(name.partition(" ")[0]) for name in names) or not look.is_file(header):
        raise UserError(
            f"compile.enable = true needs {' or '.join(names)} on the PATH and {header}; install them (Debian: apt-get "
            "install g++ python3-dev), or use false"
        )

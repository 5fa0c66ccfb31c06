"""What PC(W) is for one matrix: a method (`pc.methods.base.Method`), chosen by its name. Imports no torch."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pc.config import PCConfig
    from pc.methods.base import Method

# name: the module of this folder and the class in it
METHODS = {
    "polynomial": ("normalised_polynomial", "NormalisedPolynomial"),
}


@cache
def method_of(config: "PCConfig") -> "Method":
    """The method of a config with one level (`PCConfig.for_block`)."""
    module, name = METHODS[config.method]
    return getattr(import_module(f"pc.methods.{module}"), name)(config)

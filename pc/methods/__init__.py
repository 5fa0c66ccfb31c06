"""What PC(W) is for one matrix: a method (`pc.methods.base.Method`), chosen by its name in `pc.config.METHODS`."""

from functools import cache
from pkgutil import resolve_name

from pc.config import METHODS, PCConfig
from pc.methods.base import Method


@cache
def method_of(config: PCConfig) -> Method:
    """The method of a config with one level (`PCConfig.for_block`)."""
    return resolve_name(METHODS[config.method])(config)

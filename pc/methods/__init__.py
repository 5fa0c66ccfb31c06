"""What PC(W) is for one matrix: a method (`pc.methods.base.Method`), chosen by its name in `pc.config.METHODS`."""

from functools import cache
from pkgutil import resolve_name

from pc.config import METHODS, PCConfig
from pc.methods.base import Method


@cache
def method_of(config: PCConfig) -> Method:
    """The method of a config with one level (`PCConfig.for_block`)."""
    return resolve_name(METHODS[config.method])(config)


def describe(config: PCConfig) -> str:
    """What PC(W) is, in a few words; by the entries of `blocks` where they differ."""
    of_blocks = {block: method_of(config.for_block(block)).describe() for block in config.blocks}
    if len(set(of_blocks.values())) == 1:
        return of_blocks[config.blocks[0]]
    return "; ".join(f"{block}: {description}" for block, description in of_blocks.items())

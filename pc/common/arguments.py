"""Ranges of numbers on a command line."""

import argparse
import math
from collections.abc import Callable


def number(least: float, most: float = math.inf, kind: type = int) -> Callable[[str], float]:
    """A `type` for argparse: a finite number of this kind from `least` to `most`."""

    def read(text: str) -> float:
        value = kind(text)
        if not (least <= value <= most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} should be at least {least}, at most {most}")
        return value

    read.__name__ = kind.__name__  # argparse says "invalid int value"
    return read

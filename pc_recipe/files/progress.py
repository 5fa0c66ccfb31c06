"""A bar for work that is measured in bytes."""

import sys

from tqdm import tqdm


def byte_bar(total: int, words: str) -> tqdm:
    """It appears on stderr after a second of work; in a log file it is a line each minute."""
    return tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=words,
        delay=1,
        mininterval=1 if sys.stderr.isatty() else 60,
    )

"""What a rank prints: this project's lines and all warnings. TorchTitan's other lines are left out."""

import contextlib
import logging
import sys
from datetime import datetime
from pathlib import Path

import torchtitan
from torchtitan.tools.logging import init_logger, logger
from tqdm import tqdm

TORCHTITAN = str(Path(torchtitan.__file__).parent)
MEANINGLESS = "Peak flops undefined for"
"""TorchTitan then takes those of an A100; `pc_recipe.train.metrics` logs no MFU."""


def start_logging(rank: int) -> None:
    """Rank 0 prints every step; the others would print the same, so they print only warnings."""
    init_logger()
    logger.handlers[:] = [Console(sys.stdout)]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


class Console(logging.StreamHandler):
    """One line per record, above the bar if there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(MEANINGLESS):
            return False
        is_reported_here = record.pathname.startswith(TORCHTITAN) and record.module != "profiling"
        return record.levelno > logging.INFO or not is_reported_here

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        return f"{datetime.fromtimestamp(record.created):%m-%d %H:%M:%S} {level}{super().format(record)}"

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), tqdm.external_write_mode(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):  # if nobody reads the output any more, the run goes on
            super().handleError(record)

"""Logging of a run: a line on the console, TorchTitan's TensorBoard and W&B, and `metrics.jsonl`."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    _get_metrics_rank,
)
from torchtitan.tools.logging import logger

from pc_recipe.files import json_lines, look
from pc_recipe.files.run_log import BITS_PER_BYTE, METRICS_FILE, VALIDATION, describe_seconds, read_log
from pc_recipe.train import slow_ranks
from pc_recipe.train.loss_spikes import LossSpikes
from pc_recipe.train.parallelize import AlwaysSharded
from pc_recipe.train.progress import Progress
from pc_recipe.train.upstream_config import JobConfig

SECONDS_BETWEEN_SLOW_RANKS = 20.0
A100_FLOPS = 312e12
"""TorchTitan's value for every GPU that it does not know."""
LINES_FOR_SPIKES = 3000
"""Lines of metrics.jsonl that a resumed run reads: up to three per step, and whether a loss is in a spike depends on the 50
steps before it."""


class Loggers(LoggerContainer):
    """Passes what TorchTitan logs to each logger, every number once and under a short name."""

    NAMES = {
        "loss_metrics/global_avg_loss": "loss",
        "loss_metrics/global_max_loss": "max_loss",
        "mfu(%)": "mfu",
        "time_metrics/data_loading(s)": "data_loading_seconds",
        "memory/max_active(GiB)": "memory_active_gib",
        "memory/max_reserved(GiB)": "memory_reserved_gib",
        "validation_metrics/loss": VALIDATION,
    }
    """{TorchTitan's name: ours}. Its other names with "(" (a unit) are not logged."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        logged = {name: value for name, value in metrics.items() if name in self.NAMES or "(" not in name}
        super().log({self.NAMES.get(name, name): value for name, value in logged.items()}, step)


class JsonLinesLogger(BaseLogger):
    """Appends metrics to `metrics.jsonl`, one JSON object per line.

    Args:
        file: created with its folders; an incomplete last line, left by a crash, is removed.
        tokens: returns the training tokens so far.
    """

    def __init__(self, file: Path, tokens: Callable[[], int]) -> None:
        self._file, self._tokens = file, tokens
        file.parent.mkdir(parents=True, exist_ok=True)
        if look.is_file(file):
            json_lines.cut_torn_end(file)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        line: dict[str, Any] = {"step": step, "tokens": self._tokens(), "time": time.time()}
        for name, value in metrics.items():
            # JSON has no NaN or infinity.
            line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        json_lines.append(self._file, line)


class PCMetricsProcessor(MetricsProcessor):
    """TorchTitan's metrics processor plus `metrics.jsonl`, loss spikes, diagnostics and the time left."""

    NUMBERS = ["peak_memory", "loading_seconds", "output_seconds", "pc_seconds"]
    """What every rank measures: memory in GiB, seconds that no exchange hides (`pc_recipe.train.slow_ranks`), and those of
    PC's two passes."""

    def __init__(self, job_config: JobConfig, parallel_dims: AlwaysSharded) -> None:
        super().__init__(job_config, parallel_dims)
        self.config = config = job_config.ours
        self.tokens = 0
        """of all ranks since the start of training, those of the current step included"""
        self.positions = range(0)
        """of the current step's sequences in the order of the data"""
        self._json_lines: JsonLinesLogger | None = None
        self._spikes: LossSpikes | None = None
        self._batches = parallel_dims.batches
        self._slow_ranks_sought_at: float | None = None
        self._own_seconds: Any = 0.0  # [ranks, 2]: loading data, output layer; since the last search for slow ranks
        self._paused_at = self.time_last_log
        self._steps = 0
        """since the last log, which a validation does not end"""
        self._rank = rank = dist.get_rank() if dist.is_initialized() else 0
        self.progress = Progress(config, prints=rank == 0)
        if self.gpu_peak_flops == A100_FLOPS and "A100" not in self.device_memory_monitor.device_name:
            self.gpu_peak_flops = math.nan
        if rank != _get_metrics_rank(parallel_dims, self.job_config):
            return
        self._json_lines = JsonLinesLogger(config.folder / METRICS_FILE, lambda: self.tokens)
        loggers = Loggers()
        loggers.add_logger(self._json_lines)
        for one in getattr(self.logger, "_loggers", ()):
            loggers.add_logger(one)
            if isinstance(one, TensorBoardLogger):
                threading.excepthook = _print_no_traceback_of_tensorboard
                settings = tomli_w.dumps(config.model_dump(exclude_unset=True))
                one.writer.add_text("configuration", "    " + settings.replace("\n", "\n    "))  # as code, in Markdown
        self.logger = loggers

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        per_second = self.ntokens_since_last_log * self._batches.data_ranks / (time.perf_counter() - self.time_last_log)
        more: dict[str, Any] = {
            "tokens": self.tokens,
            "tokens_per_second": per_second,
            "step_seconds": self._batches.tokens / per_second,
        }
        self.progress.add_steps(step, more["step_seconds"])
        if (left := self.progress.seconds_left(step)) is not None:
            more["seconds_left"] = round(left, 1)
        if self._json_lines is not None:
            more |= self._count_spikes(step, global_avg_loss)
        more = (extra_metrics or {}) | more
        super().log(step, global_avg_loss, global_max_loss, grad_norm, more)
        logger.info(self._describe(step, global_avg_loss, grad_norm, more))
        if self._rank == 0:
            self._warn_of_slow_ranks()

    def pause(self) -> None:
        """Do not count the time from now to `resume` as training: validations, checkpoints, the start of a run."""
        self._paused_at = time.perf_counter()

    def resume(self) -> None:
        """At the beginning of a step."""
        self._steps += 1
        # `log_validation` has begun a new interval if it ran in between
        self.time_last_log += time.perf_counter() - max(self._paused_at, self.time_last_log)

    def own_numbers(self, output_seconds: float, pc_seconds: float) -> list[float]:
        """`NUMBERS` of this rank since the last log. Call it before `log`, which begins the next interval.

        Args:
            output_seconds: of `slow_ranks.OutputTimes`.
            pc_seconds: of `Optimizers.pc_times`.
        """
        return [
            self.device_memory_monitor.get_peak_stats().max_active_gib,
            sum(self.data_loading_times),
            output_seconds,
            pc_seconds,
        ]

    def add_numbers(self, of_ranks: Tensor) -> dict[str, float]:
        """Note `own_numbers` of all ranks [ranks, 4] for `slow_ranks`; returns what is logged of them."""
        self._own_seconds = self._own_seconds + of_ranks[:, 1:3]
        memory, _, _, pc_seconds = of_ranks.amax(0).tolist()
        steps, self._steps = self._steps, 0
        return {"memory_active_gib_of_all_ranks": memory} | ({"pc_seconds": pc_seconds / steps} if pc_seconds else {})

    def _describe(self, step: int, loss: float, grad_norm: float, more: dict[str, Any]) -> str:
        """The line of a step, at most 100 columns with date and time; metrics.jsonl has more, and more digits."""
        numbers = [f"loss {loss:.4f}", f"grad_norm {grad_norm:.3g}"]
        speed = more["tokens_per_second"]
        numbers.append(f"{speed:,.0f} tok/s" if speed < 1e5 else f"{speed / 1000:,.0f}k tok/s")
        per_device = speed / self.parallel_dims.world_size
        mfu = self.num_flops_per_token * per_device / self.gpu_peak_flops
        numbers += [f"mfu {mfu:.0%}"] if math.isfinite(mfu) else []
        return "  ".join([self.progress.describe(step), *numbers, describe_seconds(more.get("seconds_left"))]).rstrip()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        """TorchTitan's, and a line on the console."""
        more = extra_metrics or {}
        super().log_validation(loss, step, more)
        seconds = more.get("validation_seconds", 0.0)
        self.progress.add_validation(seconds)
        bits = f"  {more[BITS_PER_BYTE]:.4f} bits per byte" if BITS_PER_BYTE in more else ""
        logger.info(f"{self.progress.describe(step)}  validation_loss {loss:.4f}{bits}  in {seconds:.1f} s")

    def close(self) -> None:
        self.progress.close()
        super().close()

    def _warn_of_slow_ranks(self) -> None:
        """Warns at most every `SECONDS_BETWEEN_SLOW_RANKS`."""
        now = time.monotonic()
        if self._slow_ranks_sought_at is None:  # the first step includes compilation
            self._slow_ranks_sought_at, self._own_seconds = now, 0.0
        elif (passed := now - self._slow_ranks_sought_at) >= SECONDS_BETWEEN_SLOW_RANKS:
            loading, output = self._own_seconds.T
            for line in slow_ranks.describe_slow_ranks(loading, output, passed):
                logger.warning(line)
            self._slow_ranks_sought_at, self._own_seconds = now, 0.0

    def _count_spikes(self, step: int, loss: float) -> dict[str, int]:
        """The number of spikes so far and, where one begins, its data positions, which are also logged."""
        if self._spikes is None:  # a resumed run continues the count
            self._spikes = _spikes_so_far(self.config.folder)
        before, count = self._spikes.count, self._spikes.update(step, loss)
        if count == before:
            return {"loss_spikes": count}
        first, last = self.positions.start, self.positions.stop - 1
        logger.warning(
            f"Loss spike {count} begins at step {step} with {loss:.4g}; data positions {first}-{last} "
            f"(to rerun without them: --data.skip {first}-{last})"
        )
        return {"loss_spikes": count, "spike/first_position": first, "spike/last_position": last}

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Log these metrics, if there are any."""
        if metrics:
            self.logger.log(metrics, step)


def _print_no_traceback_of_tensorboard(ended: threading.ExceptHookArgs) -> None:
    """Its thread keeps an error of the disk, which the next write raises."""
    if not (isinstance(ended.exc_value, OSError) and type(ended.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(ended)


def _spikes_so_far(run: Path) -> LossSpikes:
    """The state after the losses that a run has logged, from its newest lines and the number of spikes in them."""
    spikes, log = LossSpikes(), read_log(run, newest=LINES_FOR_SPIKES)
    for step, loss in log.series("loss").items():
        spikes.update(step, loss)
    spikes.count = int(max(log.series("loss_spikes"), default=spikes.count))
    return spikes

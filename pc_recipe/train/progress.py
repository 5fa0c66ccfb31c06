"""How far a run is: the time left, and a bar on a terminal."""

import contextlib
import statistics
from collections import deque

from tqdm import tqdm

from pc_recipe.config import Config
from pc_recipe.files.run_log import describe_seconds

FIRST_STEPS = 2
"""The first steps of an attempt compile and warm up, and do not count."""
RECENT = 20
"""The time left is estimated from this many logged lines."""


def is_due(step: int, freq: int, last: int) -> bool:
    """In the first step and the last, and in every `freq`-th; never if `freq` is 0. So validations and diagnostics cover
    both ends of a run."""
    return freq > 0 and (step in (1, last) or step % freq == 0)


class Progress:
    """Steps and validations of a run; each kind has its own speed.

    Args:
        config: of the run.
        prints: whether this rank has the console.
    """

    def __init__(self, config: Config, prints: bool) -> None:
        self.steps = config.training.steps
        self._validation = config.validation
        self._prints = prints
        self._first_step: int | None = None
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._validation_seconds = 0.0
        self._bar: tqdm | None = None

    def add_steps(self, step: int, seconds: float) -> None:
        """`step` was logged; each step since the line before it took `seconds`."""
        if self._first_step is None:
            self._first_step = step
        if step - self._first_step >= FIRST_STEPS:
            self._step_seconds.append(seconds)

    def add_validation(self, seconds: float) -> None:
        self._validation_seconds = seconds

    def seconds_left(self, step: int) -> float | None:
        """Seconds from the end of `step` to that of the last; None while that cannot be known."""
        if not self._step_seconds:
            return None
        return (self.steps - step) * statistics.mean(self._step_seconds) + (
            self._validations_after(step) * self._validation_seconds
        )

    def describe(self, step: int) -> str:
        """ "step 3/60", equally wide for every step."""
        return f"step {step:{len(str(self.steps))}}/{self.steps}"

    def show(self, step: int) -> None:
        """Move the bar to `step`, if standard error is a terminal."""
        with contextlib.suppress(OSError):  # the terminal is gone
            if self._bar is None:
                layout = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{postfix}"
                disable = None if self._prints else True  # None: unless it is a terminal
                self._bar = tqdm(total=self.steps, bar_format=layout, disable=disable)
            self._bar.set_postfix_str(describe_seconds(self.seconds_left(step)), refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()

    def _validations_after(self, step: int) -> int:
        if not self._validation.enable:
            return 0
        regular = self.steps // self._validation.freq - step // self._validation.freq
        return regular + (step < self.steps and self.steps % self._validation.freq > 0)

"""The command that trains one config: `pc_recipe.runs.worker`, under torchrun if there are several processes."""

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from pc.errors import UserError
from pc_recipe.config import Config, write_config
from pc_recipe.files import look
from pc_recipe.files.lock import join_lock
from pc_recipe.files.own_code import own_code
from pc_recipe.files.places import PENDING
from pc_recipe.plan.installed import require_compiler, require_wandb
from pc_recipe.runs.nodes import Nodes

TRAINER = "pc_recipe.runs.worker"
ONE_MACHINE = Nodes()
SECONDS_BETWEEN_PROGRESS_LINES = 20
SECONDS_OF_ONE_REQUEST = 1.0
"""Signals within this time count as one request to stop. `timeout`, for example, signals a process and then its group."""

GLIBC_KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""Otherwise the C library returns every freed large tensor to the kernel, which clears the pages of the next one: some
15 % of CPU time, and more through cache misses."""

STEPS_ALONE = (
    "--validation.enable=false --checkpoint.enable=false --metrics.enable_tensorboard=false "
    "--diagnostics.freq=0 --diagnostics.spectra_freq=0"
).split()
"""Overrides of a run whose steps are measured: nothing but training."""


def requested_processes() -> int | None:
    """NGPU, the processes per machine, if it is given; raises UserError if it is no such number."""
    requested = os.environ.get("NGPU")
    if not requested:
        return None
    if not requested.isdecimal() or not int(requested):
        raise UserError(f"NGPU={requested} should be a number of processes")
    return int(requested)


def count_processes() -> int:
    """Processes per machine: NGPU, or one per GPU, or 1 without GPUs.

    Raises:
        UserError: NGPU is wrong, or torch cannot use the GPUs.
        SystemExit: with status 1, because another node may not have this fault: SLURM promised more GPUs than torch finds.
    """
    import torch  # here, so that scripts report mistakes before this import, which takes seconds

    from pc_recipe.train.cpu import count_promised_gpus

    promised, gpus = count_promised_gpus(), torch.cuda.device_count()
    processes = requested_processes() or max(1, promised, gpus)
    if gpus < processes <= promised:
        sys.exit(f"{socket.gethostname()} shows {gpus} of the {promised} GPUs of this job")
    if gpus and processes > gpus:
        raise UserError(f"NGPU={processes} is more than the {gpus} GPUs of this machine")
    return processes


class _Stop:
    """Handles the signals that should end a training command.

    The first one asks the command to save and stop, by SIGUSR2 to its ranks. A later signal, or SIGQUIT, kills it.
    The command has a process group of its own, so that Ctrl-C in a terminal reaches this process alone.
    """

    def __init__(self, under_torchrun: bool, under_slurm: bool) -> None:
        self.process: subprocess.Popen | None = None
        self.number = 0
        """The first signal that asked this process to end."""
        self.number_at = 0.0
        self.asked_at: float | None = None
        self._under_torchrun, self._under_slurm = under_torchrun, under_slurm

    def handle(self, number: int, _) -> None:
        if self._under_slurm or number == signal.SIGUSR2:
            self.ask()
        elif number == signal.SIGQUIT:
            self.number = self.number or number
            self._end()
        elif not self.number:
            self.number, self.number_at = number, time.monotonic()
            with contextlib.suppress(OSError):  # the terminal is gone
                name = signal.Signals(number).name
                print(
                    f"{name}: saving and stopping after this step; another signal ends it at once",
                    file=sys.stderr,
                    flush=True,
                )
            self.ask()
        elif time.monotonic() - self.number_at > SECONDS_OF_ONE_REQUEST:
            self._end()

    def ask(self) -> None:
        """Ask the ranks; repeated until the command has ended, because starting ranks ignore it."""
        self.asked_at = self.asked_at or time.monotonic()
        for rank in self._ranks():
            with contextlib.suppress(OSError):  # it has just ended
                os.kill(rank, signal.SIGUSR2)

    def _end(self) -> None:
        if self.process is not None:
            for leader in {self.process.pid, *self._ranks()}:  # torchrun gives each rank a process group of its own
                with contextlib.suppress(OSError):
                    os.killpg(leader, signal.SIGKILL)

    def _ranks(self) -> list[int]:
        if self.process is None:
            return []
        started = self.process.pid
        if not self._under_torchrun:
            return [started]
        with contextlib.suppress(OSError):  # it has just ended
            return [int(rank) for rank in Path(f"/proc/{started}/task/{started}/children").read_text().split()]
        return []


def run_command(
    command_line: Sequence[str],
    environment: dict[str, str],
    locks: Sequence[TextIO] = (),
    output: TextIO | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    under_slurm: bool = False,
) -> int:
    """Run a training command to its end and return its exit status.

    The first Ctrl-C or SIGTERM, or the end of the terminal, makes it save and stop, as SIGUSR2 does; the next signal, or
    SIGQUIT (Ctrl-\\), ends it at once.

    Args:
        locks: open files that the command inherits, so that locks last if this process is killed.
        output: in place of the console.
        meanwhile: called from time to time.
        under_slurm: signals never kill the command; each asks it to save and stop. SLURM sends SIGTERM some time before it
            takes the nodes away, perhaps to this process alone (`proctrack/cgroup`), and kills what takes too long.

    Raises:
        SystemExit: after one of these signals, when the command has ended, but not under SLURM.
    """
    stop = _Stop("torch.distributed.run" in command_line, under_slurm)
    ends = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP
    # not those that are ignored, as under nohup or a script's `&`
    numbers = [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]
    # Handle them before the command starts, or a signal in between would end this process and leave the command alone.
    # Ignore SIGUSR2 while it starts: the command inherits that, so an early request cannot kill it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    before = {number: signal.signal(number, stop.handle) for number in numbers}
    stop.process = process = subprocess.Popen(
        command_line,
        env=environment,
        pass_fds=[file.fileno() for file in locks],
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        process_group=None if under_slurm else 0,
    )
    before[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, stop.handle)
    status, told_at = None, time.monotonic()
    while status is None:
        try:
            status = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if stop.asked_at:
                stop.ask()
            elif time.monotonic() - told_at >= SECONDS_BETWEEN_PROGRESS_LINES:
                with contextlib.suppress(OSError, UserError):  # only the command's end ends this loop
                    meanwhile()
                told_at = time.monotonic()
    for number, handler in before.items():
        signal.signal(number, handler)
    if stop.number:
        sys.exit(128 + stop.number)
    return status if status >= 0 else 128 - status


def build_command(
    config: Config, processes: int, nodes: Nodes = ONE_MACHINE, *, under_torchrun: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Command and environment that train a config with `processes` on this machine and on each of the other nodes.

    Writes pending.toml, which the processes read. It becomes the folder's config.toml once nothing refuses the start.
    Under torchrun every rank writes to <run folder>/logs, rank 0 also to the console. A single process
    needs no torchrun, which takes seconds.

    Args:
        config: with its micro-batch (`pc_recipe.plan.micro_batch`).
        under_torchrun: use torchrun for a single process too.

    Raises:
        UserError: the config needs a compiler or wandb, which this machine lacks.
    """
    require_compiler(config)
    folder = config.folder
    write_config(config, folder / PENDING)
    rendezvous, meeting = nodes.rendezvous()
    environment = _wandb_environment(config) | build_environment(processes) | meeting
    trainer = ["-m", TRAINER, str(folder / PENDING)]
    if processes == nodes.count == 1 and not under_torchrun:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        return [sys.executable, *trainer], environment | alone
    console = ["--tee=3", "--local-ranks-filter=0"] if nodes.rank == 0 else ["--redirects=3"]
    options = [*rendezvous, f"--nproc-per-node={processes}", "--role=rank", *console]
    logs = f"--log-dir={folder / 'logs'}"
    return [sys.executable, "-m", "torch.distributed.run", *options, logs, *trainer], environment


def _wandb_environment(config: Config) -> dict[str, str]:
    """What Weights & Biases reads: every attempt of a run continues its one page there."""
    require_wandb(config)
    if not config.metrics.enable_wandb:
        return {}
    folder = config.folder
    with join_lock(folder) as file:  # nothing writes to it, so its modification time is the run's first start
        first = f"{folder.resolve()} {os.fstat(file.fileno()).st_mtime_ns}"
    names = {"WANDB_PROJECT": "pc-layer", "WANDB_RUN_NAME": str(folder).removeprefix("outputs/")}
    return names | {"WANDB_RUN_ID": hashlib.sha256(first.encode()).hexdigest()[:32], "WANDB_RESUME": "allow"}


def find_failure(run_folder: Path) -> str | None:
    """Why the newest attempt (since the run's `lock` was touched) failed, from a rank's log; None if no rank says.

    Lines that begin with "error: " are mistakes; "failed: " may succeed on a later try. For a crash: the last
    line and the log.
    """
    begin = (run_folder / "lock").stat().st_mtime if look.is_file(run_folder / "lock") else 0.0
    files = [file for file in look.files_below(run_folder / "logs") if file.name == "stderr.log"]
    logs = [log for log in files if log.stat().st_mtime >= begin]
    crash = None
    for log in sorted(logs, key=lambda log: log.stat().st_mtime):
        lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        messages = [line for line in lines if line.startswith(("error: ", "failed: "))]
        if messages:
            return "\n".join(messages)
        if crash is None and any(line.startswith("Traceback (most recent call last)") for line in lines):
            crash = f"rank {log.parent.name} ended with {lines[-1]!r}; its log is {log}"
    return crash


def find_kill(status: int, words: str) -> str:
    """ "killed by SIGKILL", if a signal ended a training command, or the first of its ranks; else "".

    Args:
        status: of `run_command`.
        words: the command's output, which ends with torchrun's report if there are several ranks.
    """
    with contextlib.suppress(ValueError):  # no signal has this status
        return f"killed by {signal.Signals(status - 128).name}"
    of_rank = (
        re.search(r"Signal \d+ \((SIG\w+)\)", words.rpartition("Root Cause")[2]) if "Root Cause" in words else None
    )
    return f"a rank was killed by {of_rank[1]}" if of_rank else ""


def build_environment(processes: int) -> dict[str, str]:
    """This process's environment, with the CPU's cores divided among the processes.

    GPU memory uses expandable segments, as in TorchTitan's launcher, so that changing shapes (PC's batches between
    steps) do not fragment it. CPU memory is kept between steps. Compiled code is cached in a folder of the user:
    torch's own is in the shared /tmp, where another user may create it first.
    """
    import torch

    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    keeps_memory = {} if torch.cuda.device_count() else GLIBC_KEEPS_MEMORY
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONFAULTHANDLER": "1",  # a crash in native code says where the process was
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": os.path.expanduser("~/.cache/pc-layer"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # of CPU kernels; they would be in /tmp all the same
    }
    # torchrun reads PET_NNODES, say, as its option --nnodes; Kubeflow sets such names
    given = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    return {**defaults, **keeps_memory, **given, **own_code()}

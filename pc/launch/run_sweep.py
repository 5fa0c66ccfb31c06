"""Run a sweep on this machine, one training run after another."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TextIO

from pc.errors import UserError
from pc.launch import equal_runs, runs, torchrun
from pc.launch.local import fetch_demo_data
from pc.launch.sweep import Run, Sweep, begin
from pc.titan.config import JobConfig
from pc.titan.resolve import resolve

SECONDS_BETWEEN_PROGRESS_LINES = 20


def run_all(sweeps: Sequence[Sweep]) -> None:
    """Train what is not finished; a run that was interrupted continues from its checkpoint.

    A run that fails is reported and the next one starts; repeating the command tries it again. Several such commands
    share sweeps: a run that another one trains is passed over. Of equal runs one is trained, and the others take it over.
    """
    for sweep in sweeps:
        begin(sweep)
    processes = torchrun.processes_here()
    order = [(sweep, run) for sweep in sweeps for run in sweep.runs]
    for number, (sweep, run) in enumerate(order, start=1):
        label = f"[{number}/{len(order)}] {run.name}"
        if runs.state_of(run).state == "finished":
            print(f"{label}: finished before", flush=True)
            continue
        planned = equal_runs.plan(sweeps)[number - 1]
        if planned.owner != run:
            print(f"{label}: the same run as {planned.owner.folder}", flush=True)
            continue
        if planned.trained_elsewhere is not None:
            print(f"{label}: another process trains the same run in {planned.trained_elsewhere}", flush=True)
            continue
        fetch_demo_data(resolve(run.config, run.overrides, JobConfig))
        try:
            held = runs.lock(run.folder)
        except UserError:
            print(f"{label}: another process trains it", flush=True)
            continue
        train(run, held, processes, label)
        equal_runs.take_over(sweeps)
        runs.collect(sweep)
    for sweep in sweeps:
        runs.collect(sweep)
        print(runs.status_text(sweep))
        print(f"Results: {sweep.folder / 'results.jsonl'}. Next: python scripts/sweep.py select {sweep.path}")
    failed = [run.name for _, run in order if runs.state_of(run).state not in ("finished", "running")]
    if failed:
        raise UserError(f"{len(failed)} of {len(order)} runs did not finish: {', '.join(failed)}")


def train(run: Run, held: TextIO, processes: int, label: str) -> None:
    """One run to its end, its output in <run folder>/train.log, its progress on the console.

    Args:
        held: the folder's lock (`runs.lock`), released at the end.
    """
    with held:
        log = run.folder / "train.log"
        print(f"{label}: from step {runs.latest_checkpoint(run.folder)}, log in {log}", flush=True)
        words, environment = torchrun.here(run.config, run.overrides, run.folder, processes)
        with open(log, "a") as output:
            trainer = subprocess.Popen(
                words, env=environment, stdout=output, stderr=subprocess.STDOUT, pass_fds=[held.fileno()]
            )
        _wait(trainer, run, label)
    if trainer.returncode != 0 and runs.state_of(run).state != "failed":
        last_words = " ".join(runs.tail(log)) or "no output"
        runs.write_state(run, "failed", f"status {trainer.returncode}: {last_words[:300]}")
    state = runs.state_of(run)
    print(f"{label}: {state.state} at step {state.step} {state.reason}".rstrip(), flush=True)


def _wait(trainer: subprocess.Popen, run: Run, label: str) -> None:
    """Wait for the trainer, saying now and then how far it is; end it when this process is ended."""

    def end(signal_number, _) -> None:
        trainer.terminate()
        trainer.wait()
        sys.exit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    shown = 0
    try:
        while True:
            try:
                trainer.wait(timeout=SECONDS_BETWEEN_PROGRESS_LINES)
                return
            except subprocess.TimeoutExpired:
                training, _ = runs.read_metrics(run.folder)
                if training and max(training) != shown:
                    shown = max(training)
                    print(
                        f"{label}: step {shown}  loss {training[shown].get('loss', float('nan')):.4f}",
                        flush=True,
                    )
    except KeyboardInterrupt:
        trainer.wait()  # Ctrl-C reached it too
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)

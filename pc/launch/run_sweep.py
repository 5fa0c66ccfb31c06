"""Run a sweep on this machine, one training run after another."""

import signal
import subprocess
import sys
from typing import TextIO

from pc.errors import UserError
from pc.launch import runs, torchrun
from pc.launch.local import fetch_demo_data
from pc.launch.sweep import Run, Sweep, begin
from pc.titan.config import JobConfig
from pc.titan.resolve import resolve

SECONDS_BETWEEN_PROGRESS_LINES = 20


def run_all(sweep: Sweep) -> None:
    """Train what is not finished; a run that was interrupted continues from its checkpoint.

    A run that fails is reported and the next one starts; repeating the command tries it again. Several such commands
    share a sweep: a run that another one trains is passed over.
    """
    begin(sweep)
    processes = torchrun.processes_here()
    for number, run in enumerate(sweep.runs, start=1):
        label = f"[{number}/{len(sweep.runs)}] {run.name}"
        if runs.state_of(run).state == "finished":
            print(f"{label}: finished before", flush=True)
            continue
        fetch_demo_data(resolve(run.config, run.overrides, JobConfig))
        try:
            held = runs.lock(run.folder)
        except UserError:
            print(f"{label}: another process trains it", flush=True)
            continue
        train(run, held, processes, label)
        runs.collect(sweep)
    print(runs.status_text(sweep))
    print(f"Results: {sweep.folder / 'results.jsonl'}. Next: python scripts/sweep.py select {sweep.path}")
    failed = [run.name for run in sweep.runs if runs.state_of(run).state not in ("finished", "running")]
    if failed:
        raise UserError(f"{len(failed)} of {len(sweep.runs)} runs did not finish: {', '.join(failed)}")


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

"""Train sweeps on this machine, one training run after another."""

import functools
import shlex
import sys
from collections.abc import Sequence
from typing import TextIO

from pc.errors import UserError
from pc_recipe.files.inside import no_link
from pc_recipe.files.lock import lock
from pc_recipe.files.run_folder import find_newest_step, read_state, write_failure, write_state
from pc_recipe.files.run_log import describe_seconds, find_last_step, read_log
from pc_recipe.runs import launch
from pc_recipe.runs.local import list_here, make_demo_data
from pc_recipe.runs.run import Run
from pc_recipe.runs.sweep import equal_runs
from pc_recipe.runs.sweep.results import collect, describe_status
from pc_recipe.runs.sweep.spec import Sweep
from pc_recipe.runs.sweep.start import check_runs


def train_all(sweeps: Sequence[Sweep]) -> None:
    """Check all unfinished runs, then train them; an interrupted run continues from its checkpoint.

    A failed run is reported and the next one starts; repeating the command retries it. Several such commands can work
    on the same sweeps: each skips runs that another one is training. Of equal runs one is trained; the others reuse it.
    """
    processes = launch.count_processes()
    groups = equal_runs.group_runs(sweeps, processes)
    remaining = [run for group in groups for run in group.to_train]
    for run in remaining:
        make_demo_data(run.resolved)
    warned = check_runs(groups, processes)
    warned |= {warning: run.name for run in reversed(remaining) for warning in list_here(run.resolved)}
    for warning, name in warned.items():
        print(f"warning: {name}: {warning}", file=sys.stderr, flush=True)
    order = [(sweep, run) for sweep in sweeps for run in sweep.runs]
    order.sort(key=lambda one: one[1].seed or 0)  # by seed, so that an early end leaves pairs of arms
    for number, (sweep, run) in enumerate(order, start=1):
        label = f"[{number}/{len(order)}] {run.name}"
        if read_state(run.folder).state == "finished":
            print(f"{label}: finished before", flush=True)
            continue
        equal = next(group for group in equal_runs.group_runs(sweeps, processes) if run in group.runs)
        if run not in equal.to_train:
            print(f"{label}: equal to {equal.folder}", flush=True)
            continue
        if equal.state == "running" and equal.folder != run.folder:
            print(f"{label}: another process is training an equal run in {equal.folder}", flush=True)
            continue
        here = shlex.quote(str(run.folder))
        for other in equal.of_other_code[:1]:
            print(
                f"{label}: {other} is an equal run, but of other code or another torch, so this one is trained; to use "
                f"that one, stop this one and run: rm -r {here} && ln -s {shlex.quote(str(other.resolve()))} {here}",
                flush=True,
            )
        try:
            lock_file = lock(run.folder)
        except UserError:
            print(f"{label}: another process is training it", flush=True)
            continue
        if read_state(run.folder).state == "finished":  # finished since the check above
            lock_file.close()
            print(f"{label}: another process finished it", flush=True)
            continue
        train_one(run, lock_file, processes, label)
        equal_runs.take_over(sweeps, processes)
        collect(sweep)
    for sweep in sweeps:
        collect(sweep)
        print(describe_status(sweep))
        print(f"Results: {sweep.folder / 'results.jsonl'}. Next: python scripts/sweep.py select {sweep.path}")
    failed = [run.name for _, run in order if read_state(run.folder).state not in ("finished", "running")]
    if failed:
        raise UserError(f"{len(failed)} of {len(order)} runs did not finish: {', '.join(failed)}")


def train_one(run: Run, lock_file: TextIO, processes: int, label: str) -> None:
    """Train one run to its end, with its output in <run folder>/train.log and its progress on the console.

    Args:
        lock_file: the folder's lock (`pc_recipe.files.lock`), released at the end.

    Raises:
        SystemExit: the run was asked to stop, and so is the sweep.
    """
    from pc_recipe.plan import micro_batch  # takes seconds

    log, step = run.folder / "train.log", find_newest_step(run.folder)
    try:
        with lock_file, open(log, "a", opener=no_link) as output:
            print(f"{label}: from step {step}, log in {log}", flush=True)
            config, begin = micro_batch.choose(run.resolved, processes), output.tell()
            command = launch.build_command(config, processes)
            write_state(run.folder, "running", step, run.resolved.training.steps)  # replaces that of an earlier end
            progress = functools.partial(_print_progress, run, label)
            status = launch.run_command(*command, [lock_file], output, progress)
    except SystemExit:  # after Ctrl-C or SIGTERM
        _print_state(run, label)
        raise
    except UserError as error:  # in this run's settings, or on this machine
        write_failure(run.folder, str(error))
        _print_state(run, label)
        return
    if status != 0:
        words = log.read_bytes()[begin:].decode(errors="replace")
        killed = launch.find_kill(status, words)
        if killed or read_state(run.folder).state != "failed":
            last = [line.strip() for line in words.splitlines() if line.strip()][-1:] or ["no output"]
            reason = f"{killed or f'status {status}'}, last words: {last[0][:300]}"
            write_failure(run.folder, reason, find_last_step(run.folder))
    _print_state(run, label)
    if status == 0 and read_state(run.folder).state == "stopped":  # by SIGUSR2
        sys.exit(0)


def _print_state(run: Run, label: str) -> None:
    state = read_state(run.folder)
    print(f"{label}: {state.state} at step {state.step} {state.reason}".rstrip(), flush=True)


def _print_progress(run: Run, label: str) -> None:
    """Print the newest logged step, its loss and the time left."""
    lines = read_log(run.folder, newest=5).lines  # up to three per step
    for line in [line for line in lines if line.get("loss") is not None][-1:]:
        steps, left = read_state(run.folder).steps, describe_seconds(line.get("seconds_left"))
        print(f"{label}: step {line['step']}/{steps}  loss {line['loss']:.4f}  {left}".rstrip(), flush=True)

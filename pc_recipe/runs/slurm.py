"""SLURM: submit a run, be one task of a run or a sweep, and decide afterwards whether to requeue.

One batch script, scripts/slurm/train.sbatch, is used for single runs and arrays, on one node or many. Inside the
allocation it calls this module twice: `run_task` runs torchrun on every node; `requeue_or_end` requeues the job unless
the run is finished or cannot continue. No slurmdbd or sacct is needed: the state of a run is read from its own folder.
"""

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import TypedDict

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.config import Config, load_config, write_config
from pc_recipe.files import look, record
from pc_recipe.files.atomic import write_atomically
from pc_recipe.files.inside import inside, require_plain
from pc_recipe.files.lock import is_locked, lock
from pc_recipe.files.own_code import own_code
from pc_recipe.files.record import Malformed
from pc_recipe.files.run_folder import find_newest_step, read_state, write_failure
from pc_recipe.plan.allocation import TRAIN_SCRIPT, Allocation
from pc_recipe.plan.check import (
    check,
    check_data,
    check_layout,
    check_on_ranks,
    check_settings,
    estimate_hours,
    has_finished,
)
from pc_recipe.runs import launch
from pc_recipe.runs.nodes import Nodes, find_gloo_interface
from pc_recipe.runs.run import Run

REQUEUES_WITHOUT_PROGRESS = 2
SECONDS_FOR_LOCKS_OF_A_LOST_NODE = 150
MISTAKE = 2
"""The exit status after a `UserError`."""


def submit_run(config: str, overrides: Sequence[str], allocation: Allocation, queues: bool = True) -> str:
    """Check one run, print what a dry run says, and queue it.

    Args:
        queues: False only returns the command that would queue it.

    Raises:
        UserError: mistakes, or a time limit that is too short.
    """
    resolved = load_config(config, overrides)
    report = check_settings(resolved)
    check_data(report)
    check_layout(report, allocation.world_size)
    report.raise_errors(f"{config}: ")
    if has_finished(resolved):
        return f"{resolved.job.dump_folder} has finished before; to train on, raise training.steps"
    check_on_ranks(report, allocation.gpu_gib)
    report.raise_errors(f"{config}: ")
    if allocation.gpus_per_node:  # the estimate is for GPUs
        hours = estimate_hours(report, allocation.world_size)
        allocation.require_time(hours, config)
        report.facts.append(("time limit", allocation.describe_limit(hours)))
    print(report.text(), flush=True)
    folder = report.config.folder
    options = [f"--job-name={folder.name}", *allocation.sbatch_options()]
    if not queues:
        return shlex.join(job_command(folder, options, [config, *overrides]))
    job = submit_job(folder, options, [resolved])
    return f"job {job}: {config}, logs in {folder}/slurm" if job else f"sbatch queued nothing of {config}"


def submit_job(folder: Path, options: list[str], configs: Sequence[Config]) -> str:
    """Submit train.sbatch for a run, or an array of runs, with sbatch; returns the job's id, "" with --test-only. Passes
    on what sbatch prints.

    The job gets a copy of each configuration, because people edit a file for the next run while one waits or trains.
    """
    logs = inside(folder, "slurm")
    logs.mkdir(parents=True, exist_ok=True)  # without the folder SLURM drops the output
    require_plain(logs)
    copies = logs / f"configs-{secrets.token_hex(4)}"
    for index, config in enumerate(configs):
        write_config(config, copies / f"{index}.toml")
    # the job uses the interpreter and the code that submitted it, and all of its GPUs
    environment = {**os.environ, "PC_PYTHON": sys.executable, **own_code()}
    environment.pop("NGPU", None)
    command = job_command(folder, options, [str(copies)])
    submitted = subprocess.run(command, capture_output=True, text=True, env=environment)
    if submitted.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in submitted.stderr.splitlines()]
        raise UserError(f"sbatch: {'; '.join(filter(None, lines))} (sinfo shows partitions and nodes)")
    print(submitted.stderr, end="", file=sys.stderr)
    return submitted.stdout.strip().split(";")[0]


def job_command(folder: Path, options: list[str], arguments: Sequence[str]) -> list[str]:
    """What `submit_job` runs. Its logs lie in the run's or sweep's folder."""
    logs = inside(folder, "slurm")  # only this is checked for links: a sweep's folder has links to equal runs
    is_array = any(option.startswith("--array") for option in options)
    output = f"--output={str(logs).replace('%', '%%')}/%x-{'%A_%a' if is_array else '%j'}.log"
    return ["sbatch", "--parsable", output, *options, str(TRAIN_SCRIPT), *arguments]


# --- inside a job -----------------------------------------------------------------------------------


def read_run(arguments: Sequence[str]) -> Run:
    """The run of a job's arguments: a folder of configurations, by the array's index, or CONFIG and overrides."""
    config, *overrides = arguments
    if look.is_folder(config):
        config = str(Path(config, f"{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}.toml"))
    folder = Path(load_config(config, overrides).job.dump_folder)
    return Run(str(folder), config, tuple(overrides), folder)


def run_task(run: Run) -> int:
    """Run torchrun on this node of the allocation; returns its exit status."""
    nodes = Nodes(int(os.environ.get("SLURM_NNODES", "1")), int(os.environ.get("SLURM_NODEID", "0")))
    # Only the first node takes the lock of the run's folder; the others wait for it at the rendezvous. After a requeue it
    # is patient, because a network file system keeps the locks of a lost node for a while, often 90 seconds.
    patience = SECONDS_FOR_LOCKS_OF_A_LOST_NODE if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 1
    locks = [lock(run.folder, patience)] if nodes.rank == 0 else []
    processes, network_here = launch.count_processes(), {}
    if nodes.count > 1:
        # The first node, where the batch script runs and has drawn a free port, has rank 0.
        host = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
        nodes = replace(nodes, master_addr=host, master_port=int(os.environ["MASTER_PORT"]))
        network_here = find_gloo_interface(host if nodes.rank else _find_last_host())
    report = check(run.resolved, processes * nodes.count)  # sbatch may have been called by hand
    report.raise_errors()
    for warning in report.warnings if nodes.rank == 0 else ():
        print(f"warning: {warning}", file=sys.stderr)
    command, environment = launch.build_command(report.config, processes, nodes, under_torchrun=True)
    return launch.run_command(command, network_here | environment, locks, under_slurm=True)


def _find_last_host() -> str:
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]


def requeue_or_end(run: Run, returncode: int) -> int:
    """Requeue the job if it should continue; returns the exit status of the batch script.

    A job that stopped by itself (time limit) or crashed is requeued at most `REQUEUES_WITHOUT_PROGRESS` times without a
    new checkpoint: a lost node is worth another try, a repeated error or a limit shorter than the start is not. A user's
    mistake is not retried. status.json may be of an earlier attempt, so "finished" needs this one's status 0.
    """
    # From the clear cases to the unclear ones. Finished: nothing to do. Refused by the lock: the state in the folder is
    # another job's, which must not be overwritten. A mistake: every try would end alike. The rest may have been the
    # machine, so it is tried again as long as checkpoints show that tries get further.
    state = read_state(run.folder)
    if state.state == "finished" and returncode == 0:
        print(f"{run.name}: finished", flush=True)
        return 0
    if returncode == MISTAKE and is_locked(run.folder):
        print(f"{run.name}: another process is training it; its state is left as it is", flush=True)
        return MISTAKE
    failure = launch.find_failure(run.folder) or ""
    # torchrun ends with 1 whatever its ranks' status, so the log tells a mistake from a crash
    is_mistake = returncode == MISTAKE or failure.startswith("error: ")
    attempts = 0 if is_mistake else _count_attempt(run)
    has_stopped = state.state == "stopped" and returncode == 0 and not is_mistake
    ended = f"stopped at step {state.step}" if has_stopped else f"ended with status {returncode}"
    if not is_mistake and attempts <= REQUEUES_WITHOUT_PROGRESS:
        return _requeue(f"{run.name}: {ended}, attempt {attempts} since the last checkpoint")
    if has_stopped:
        remedy = "a longer time limit, or more frequent checkpoints, would let it get further"
        write_failure(run.folder, f"{attempts} attempts stopped without a new checkpoint; {remedy}")
    elif state.state != "failed":
        times = "" if is_mistake else f" {attempts} times"
        reason = f"the trainer ended{times} with status {returncode}; its last output is in the job's log"
        write_failure(run.folder, reason)
    why = "another try would fail too" if is_mistake else f"{attempts} attempts since the last checkpoint"
    print(f"{run.name}: {'diverged' if state.state == 'diverged' else 'failed'}, {why}", flush=True)
    if failure:
        print(failure, flush=True)  # repeated below the reports of torchrun and srun
    return MISTAKE if is_mistake else 1


class _Attempts(TypedDict):
    """attempts.json"""

    job: str
    step: int
    attempts: int


def _count_attempt(run: Run) -> int:
    """Attempts of this job since the newest checkpoint, including this one."""
    file = run.folder / "attempts.json"
    now = {"job": _read_job(), "step": find_newest_step(run.folder)}
    attempts = 1
    with contextlib.suppress(Malformed):
        before = record.read(file, _Attempts)
        attempts += before["attempts"] if before and before | now == before else 0
    write_atomically(file, json.dumps(now | {"attempts": attempts}) + "\n")
    return attempts


def _read_job() -> str:
    """The job's name for scontrol; it stays when the job is requeued."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _requeue(why: str) -> int:
    job = _read_job()
    print(f"{why}; requeueing job {job}", flush=True)
    return subprocess.run(["scontrol", "requeue", job]).returncode


@exit_on_user_error
def main() -> None:
    action, *arguments = sys.argv[1:]
    if action == "task":
        sys.exit(run_task(read_run(arguments)))
    status, *arguments = arguments
    sys.exit(requeue_or_end(read_run(arguments), int(status)))


if __name__ == "__main__":
    main()

"""Train one config on this machine: `python -m pc.launch.local CONFIG --section.key value ...`."""

import os
import subprocess
import sys
from pathlib import Path

import tyro

from pc.common.run_folder import lock, state_of
from pc.data.demo import FOLDER as DEMO
from pc.errors import UserError, exit_on_user_error
from pc.launch import machine, torchrun
from pc.plan import dry_run
from pc.titan.config import JobConfig
from pc.titan.toml import dump_folder, resolve, to_config


@exit_on_user_error
def main() -> None:
    if len(sys.argv) < 2:
        raise UserError("no config named; usage: python -m pc.launch.local CONFIG --section.key value ...")
    config, *overrides = sys.argv[1:]
    if {"-h", "--help"} & set(overrides):
        print_help(config)
        return
    resolved = resolve(config, overrides, JobConfig)
    folder = dump_folder(config, resolved)
    processes = torchrun.processes_here()
    fetch_demo_data(resolved)
    # Report mistakes here, one line each, because torchrun's report of a failed process would bury them.
    errors = dry_run.check(config, overrides, processes).errors
    if errors:
        raise UserError("\nerror: ".join(errors))
    machine.require(to_config(resolved, JobConfig), processes)
    held = lock(folder)
    status = torchrun.run(*torchrun.here(config, overrides, folder, processes), [held])
    if status == 0:
        print(closing_words(folder))
    elif processes > 1 and (reason := torchrun.last_words(folder)):
        print(reason, file=sys.stderr)  # repeated below torchrun's report
        if reason.startswith("error: "):
            sys.exit(2)
    sys.exit(status)


def print_help(config: str) -> None:
    """Print every key with its description and its value in `config`."""
    tyro.cli(
        JobConfig,
        prog="./run_llama_train.sh [CONFIG.toml]",
        description=f"Train a config. Values shown are those of {os.path.relpath(config)}; the command line overrides them. "
        "NGPU sets the number of processes (default: one per GPU, or 1).",
        default=to_config(resolve(config, [], JobConfig), JobConfig),
        args=["--help"],
    )


def fetch_demo_data(resolved: dict) -> None:
    """Create the demo data if the config reads it."""
    if Path(resolved.get("data", {}).get("path", "")) != DEMO:
        return
    if subprocess.run([sys.executable, "-m", "pc.data.demo"]).returncode:
        raise UserError("the demo data could not be created (see above); to use other data: --data.path FOLDER")


def closing_words(folder: Path) -> str:
    """Where the run's results are and what to try next."""
    run = state_of(folder)
    if run.state == "stopped":
        return f"Stopped at step {run.step}; the same command continues from {folder}/checkpoint."
    # to type here, whether or not the environment is active
    command = Path(sys.executable).with_name("tensorboard")
    shown = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else command
    return (
        f"Checkpoints, metrics.jsonl and TensorBoard logs are in {folder}. Next: "
        f"{shown} --logdir {folder}/tb, or another config of train_configs/."
    )


if __name__ == "__main__":
    main()

"""Train one config on this machine: `python -m pc.launch.local CONFIG --section.key value ...`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import tyro

from pc.common.run_folder import lock
from pc.data.demo import FOLDER as DEMO
from pc.errors import UserError, exit_on_user_error
from pc.launch import torchrun
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
    # Mistakes are said here, in a line each: torchrun would bury them under its report of a failed process.
    errors = dry_run.check(config, overrides, processes).errors
    if errors:
        raise UserError("\nerror: ".join(errors))
    held = lock(folder)
    os.set_inheritable(held.fileno(), True)  # the trainer keeps it if this process is killed
    words, environment = torchrun.here(config, overrides, folder, processes)
    run = subprocess.Popen(words, env=environment, close_fds=False)
    # Ctrl-C reaches torchrun too, since it shares the terminal; a plain kill has to be passed on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: run.terminate())
    signal.signal(signal.SIGUSR2, lambda *_: None)
    if run.wait() == 0:
        print(closing_words(config, folder))
    elif processes > 1 and (reason := torchrun.last_words(folder)):
        print(reason, file=sys.stderr)  # again, below torchrun's report
        if reason.startswith("error: "):
            sys.exit(2)
    sys.exit(run.returncode if run.returncode >= 0 else 128 - run.returncode)


def print_help(config: str) -> None:
    """Every key with its description and the value that `config` gives it."""
    tyro.cli(
        JobConfig,
        prog="./run_llama_train.sh [CONFIG.toml]",
        description=f"Train a config. Values shown are those of {os.path.relpath(config)}; words behind it win. "
        "NGPU sets the number of processes (default: one per GPU, or 1).",
        default=to_config(resolve(config, [], JobConfig), JobConfig),
        args=["--help"],
    )


def fetch_demo_data(resolved: dict) -> None:
    """Make the demo data when the config reads it."""
    if Path(resolved.get("data", {}).get("path", "")) != DEMO:
        return
    if subprocess.run([sys.executable, "-m", "pc.data.demo"]).returncode:
        raise UserError("the demo text could not be made (see above); another text: --data.path FOLDER")


def closing_words(config: str, folder: Path) -> str:
    """Where the run's results lie and what to try next."""
    status = json.loads((folder / "status.json").read_text())
    if status["state"] == "stopped":
        return f"Stopped at step {status['step']}; the same command continues from {folder}/checkpoint."
    return (
        f"Checkpoints, metrics.jsonl and TensorBoard logs are in {folder}. Next: "
        f"{tensorboard()} --logdir {folder}/tb, or another config of train_configs/."
    )


def tensorboard() -> str:
    """The command as it can be typed here, whether or not the environment is active."""
    command = Path(sys.executable).with_name("tensorboard")
    return os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)


if __name__ == "__main__":
    main()

"""The command line of sweeps."""

import argparse

from pc.errors import exit_on_user_error
from pc.launch import run_sweep, runs, selection, slurm, torchrun
from pc.launch.sweep import load, plan_text


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run the training runs that a sweep's TOML describes, and choose the best."
    )
    actions = parser.add_subparsers(dest="action", required=True)
    described = {
        "plan": "print the runs, their tokens and GPU-hours",
        "run": "train here, one run after another; repeat to continue",
        "submit": "queue the unfinished runs as a SLURM array",
        "status": "how far every run is, and why one failed",
        "select": "choose the stable run with the lowest final metric",
    }
    commands = {name: actions.add_parser(name, help=text, description=text) for name, text in described.items()}
    for command in commands.values():
        command.add_argument("sweep", help="TOML file of the sweep")
    commands["plan"].add_argument(
        "--tokens-per-second", type=float, help="throughput of one GPU, for an estimate of GPU-hours"
    )
    slurm.add_options(commands["submit"])
    commands["submit"].add_argument("--at-a-time", type=int, default=0, help="runs at once (default: all)")
    arguments = parser.parse_args()

    sweep = load(arguments.sweep)
    if arguments.action == "plan":
        print(plan_text(sweep, torchrun.processes_here(), arguments.tokens_per_second))
    elif arguments.action == "run":
        run_sweep.run_all(sweep)
    elif arguments.action == "submit":
        print(slurm.submit_sweep(sweep, arguments.at_a_time, slurm.Allocation.of(arguments)))
    elif arguments.action == "status":
        runs.collect(sweep)
        print(runs.status_text(sweep))
    else:
        print(selection.select(sweep))

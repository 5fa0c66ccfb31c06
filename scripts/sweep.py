"""Train the runs of a sweep's TOML, and choose the best.

python scripts/sweep.py plan   SWEEP.toml... [--tflops 300] [--world-size 8]
python scripts/sweep.py run    SWEEP.toml...
python scripts/sweep.py submit SWEEP.toml... [--gpus-per-node 8] [--nodes 1] [--at-a-time 2] [--sbatch="--time=8:00:00"]
python scripts/sweep.py status SWEEP.toml...
python scripts/sweep.py select SWEEP.toml...
"""

import argparse

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.config.command_line import at_least_one
from pc_recipe.plan.allocation import Allocation
from pc_recipe.runs import launch
from pc_recipe.runs.sweep import equal_runs
from pc_recipe.runs.sweep.local import train_all
from pc_recipe.runs.sweep.results import collect, describe_status
from pc_recipe.runs.sweep.spec import load


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    described = {
        "plan": "print the runs, their tokens and GPU-hours",
        "run": "train on this machine, one run after another; repeat to continue",
        "submit": "queue the unfinished runs as a SLURM array",
        "status": "show the progress of every run, and why one failed",
        "select": "choose the stable run with the lowest final validation loss",
    }
    commands = {name: actions.add_parser(name, help=text, description=text) for name, text in described.items()}
    for command in commands.values():
        command.add_argument(
            "sweeps", nargs="+", metavar="SWEEP", help="TOML files of sweeps; equal runs are trained once"
        )
    commands["plan"].add_argument(
        "--tflops",
        type=float,
        help="TFLOP/s of one GPU (default: 0.27 times the model's width, at most 400; an assumption)",
    )
    commands["plan"].add_argument(
        "--world-size", type=at_least_one, help="number of GPUs of a run (default: NGPU, or all GPUs here, at least 1)"
    )
    Allocation.add_options(commands["submit"])
    commands["submit"].add_argument("--at-a-time", type=at_least_one, default=0, help="runs at once (default: all)")
    arguments, unknown = parser.parse_known_args()
    refuse_overrides(unknown)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")

    sweeps = [load(path) for path in arguments.sweeps]
    if len({sweep.folder.resolve() for sweep in sweeps}) < len(sweeps):
        parser.error("two sweeps have the same folder; is one named twice?")
    if arguments.action == "plan":
        from pc_recipe.runs.sweep import budget  # takes seconds

        print(budget.table(sweeps, arguments.tflops, arguments.world_size or launch.count_processes()))
        return
    world_size = None
    if arguments.action == "run":
        world_size = launch.count_processes()
    elif arguments.action == "submit":
        world_size = Allocation.of(arguments).world_size
    for sweep in sweeps:
        equal_runs.require_unchanged(sweep, world_size)
    equal_runs.take_over(sweeps, world_size)
    if arguments.action == "run":
        train_all(sweeps)
    elif arguments.action == "submit":
        from pc_recipe.runs.sweep.submit import submit  # takes seconds

        print(submit(sweeps, arguments.at_a_time, Allocation.of(arguments)))
    elif arguments.action == "status":
        for sweep in sweeps:
            collect(sweep)
            print(describe_status(sweep))
    else:
        from pc_recipe.runs.sweep.select import select  # imports pandas and matplotlib

        for sweep in sweeps:
            print(select(sweep))


def refuse_overrides(words: list[str]) -> None:
    for word in words:
        if word.startswith("--") and "." in word:
            key = word[2:].partition("=")[0]
            raise UserError(f'{word}: a sweep reads settings only from its file: write "{key}" = [VALUE] under [axes]')


if __name__ == "__main__":
    main()

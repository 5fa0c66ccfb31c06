"""Check a config on the login node, say what it takes, and queue its training.

python scripts/slurm/submit.py CONFIG.toml [--gpus-per-node 8] [--nodes 1]
                               [--sbatch="--partition=main --time=8:00:00"] [--print] [--section.key value ...]
"""

import argparse

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import parse_with_overrides
from pc_recipe.plan.allocation import Allocation
from pc_recipe.runs.slurm import submit_run


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", help="TOML file of the run")
    Allocation.add_options(parser)
    parser.add_argument("--print", action="store_true", help="print the command that would queue it, and queue nothing")
    arguments, overrides = parse_with_overrides(parser)
    print(submit_run(arguments.config, overrides, Allocation.of(arguments), queues=not arguments.print))


if __name__ == "__main__":
    main()

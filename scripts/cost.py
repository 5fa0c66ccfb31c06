"""FLOPs of a config's step and of PC. Time and memory of real steps: benchmarks/step.py.

Usage: python scripts/cost.py CONFIG [--world-size N] [--output DIR] [--section.key value ...]
"""

import argparse
from pathlib import Path

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one, parse_with_overrides


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, help="TOML of train_configs/")
    parser.add_argument("--world-size", type=at_least_one, default=8, help="GPUs to count for (default: 8)")
    parser.add_argument("--output", type=Path, help="folder for cost.md (default: print only)")
    arguments, overrides = parse_with_overrides(parser)
    from pc_recipe.config import load_config
    from pc_recipe.files.atomic import write_atomically
    from pc_recipe.plan import cost

    text = cost.table(cost.RunCost(load_config(arguments.config, overrides), arguments.world_size))
    print(text)
    if arguments.output is not None:
        write_atomically(arguments.output / "cost.md", text)
        print(arguments.output / "cost.md")


if __name__ == "__main__":
    main()

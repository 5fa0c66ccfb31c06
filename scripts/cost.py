"""FLOPs of a config's step and of PC; with --measure also time and memory of real steps with and without PC.

Usage: python scripts/cost.py CONFIG [--world-size N] [--measure] [--output DIR] [--section.key value ...]
"""

import argparse
from pathlib import Path

from pc.errors import exit_on_user_error
from pc_recipe.config.command_line import parse_with_overrides


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="TOML of train_configs/")
    parser.add_argument("--world-size", type=int, default=8, help="GPUs to count for (default: 8)")
    parser.add_argument("--measure", action="store_true", help="train a few steps here, on NGPU processes")
    parser.add_argument("--output", type=Path, help="folder for cost.md (default: print only)")
    arguments, overrides = parse_with_overrides(parser)
    from pc_recipe.report.cost_report import report

    report(arguments.config, overrides, arguments.world_size, arguments.measure, arguments.output)


if __name__ == "__main__":
    main()

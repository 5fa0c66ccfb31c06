"""Inspect a folder of token shards: its sources, sizes, first documents, checksums.

Usage: python scripts/inspect_data.py FOLDER [--documents N]
"""

import argparse

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description="Inspect a folder of token shards.")
    parser.add_argument("folder")
    parser.add_argument("--documents", type=at_least_one, default=3, help="how many to show (default: %(default)s)")
    arguments = parser.parse_args()
    from pc_recipe.data.inspection import inspect

    inspect(**vars(arguments))


if __name__ == "__main__":
    main()

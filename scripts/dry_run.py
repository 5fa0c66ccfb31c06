"""Check a config without a GPU: names, types, sizes, data, memory and disk.

python scripts/dry_run.py CONFIG.toml [--world-size 8] [--gpu-gib 80] [--no-data] [--section.key value ...]
"""

import argparse
import sys

from pc.errors import exit_on_user_error
from pc_recipe.config import load_config


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--world-size", type=int, default=8, help="total number of GPUs (default 8)")
    parser.add_argument("--gpu-gib", type=float, help="memory of a GPU (default: of one here, or 79)")
    parser.add_argument("--no-data", action="store_true", help="missing data is a warning, not an error")
    arguments, overrides = parser.parse_known_args()
    config = load_config(arguments.config, overrides)
    from pc_recipe.runs.check import check_config  # takes seconds

    report = check_config(config, arguments.world_size, needs_data=not arguments.no_data, gpu_gib=arguments.gpu_gib)
    print(report.text())
    sys.exit(2 if report.errors else 0)


if __name__ == "__main__":
    main()

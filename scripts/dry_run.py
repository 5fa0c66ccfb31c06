"""Say before a run whether it fits, how long it takes and what is missing: no GPU is needed, and nothing is written.

python scripts/dry_run.py CONFIG.toml [--world-size 16] [--gpu-memory 24] [--tflops 300] [--no-data] [--section.key value ...]
"""

import argparse
import sys

from pc.command import exit_on_user_error
from pc_recipe.config import load_config
from pc_recipe.config.command_line import at_least_one, parse_with_overrides


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument(
        "--world-size", type=at_least_one, help="total number of GPUs (default: NGPU, or all GPUs here, at least 1)"
    )
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="of each GPU (default: of a GPU here, or 79)")
    parser.add_argument(
        "--tflops",
        type=float,
        help="TFLOP/s of one GPU (default: assumed from the model's width; without a GPU or --world-size, no time is given)",
    )
    parser.add_argument("--no-data", action="store_true", help="missing data is a warning, not an error")
    arguments, overrides = parse_with_overrides(parser)
    config = load_config(arguments.config, overrides)
    import torch

    from pc_recipe.plan.check import check, estimate_hours  # takes seconds
    from pc_recipe.runs.launch import count_processes

    ranks = count_processes() if arguments.world_size is None else arguments.world_size
    report = check(config, ranks, needs_data=not arguments.no_data, gpu_gib=arguments.gpu_memory)
    if not report.errors and (arguments.world_size or arguments.tflops or torch.cuda.is_available()):
        estimate_hours(report, ranks, arguments.tflops)
    print(report.text())
    sys.exit(2 if report.errors else 0)


if __name__ == "__main__":
    main()

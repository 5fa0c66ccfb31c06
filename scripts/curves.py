"""Compare runs: losses against tokens and time, speedup, activation size, estimator error; final losses of a sweep.

Usage: python scripts/curves.py RUN... [--output DIR]
       python scripts/curves.py --sweep FOLDER... [--baseline RUN...] [--output DIR]
"""

import argparse
from pathlib import Path

from pc.errors import exit_on_user_error
from pc_recipe.config.command_line import existing


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=existing, metavar="RUN", help="run folders; the first is the reference")
    parser.add_argument("--sweep", nargs="+", type=existing, default=[], metavar="FOLDER", help="results of sweeps")
    parser.add_argument(
        "--baseline", nargs="+", type=existing, default=[], metavar="RUN",
        help="runs to draw as lines, one for each config of the sweep",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("outputs/curves"), help="folder for figures and tables")
    arguments = parser.parse_args()
    if not arguments.runs and not arguments.sweep:
        parser.error("give at least one RUN or --sweep FOLDER")
    if arguments.baseline and not arguments.sweep:
        parser.error("--baseline needs --sweep")
    from pc_recipe.report.figures import draw_curves, draw_sweeps

    if arguments.runs:
        draw_curves(arguments.runs, arguments.output)
    if arguments.sweep:
        draw_sweeps(arguments.sweep, arguments.baseline, arguments.output)


if __name__ == "__main__":
    main()

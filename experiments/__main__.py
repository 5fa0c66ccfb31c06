"""Collect the runs of sweeps in one file, make tables with n and noise from it, and renew the numbers of pages.

python -m experiments collect outputs/sweeps/NAME... --study NAME --output experiments/NAME
python -m experiments report experiments/NAME
python -m experiments pages
"""

import argparse
from pathlib import Path

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import existing


def _with_runs(text: str) -> Path:
    return existing(f"{text}/runs.jsonl").parent


def _with_results(text: str) -> Path:
    return existing(f"{text}/results.jsonl").parent


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser("python -m experiments", description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    collecting = actions.add_parser("collect", help="add finished and diverged runs to runs.jsonl")
    collecting.add_argument(
        "sweeps", type=_with_results, nargs="+", help="sweep folders with results.jsonl; the reference arm's first"
    )
    collecting.add_argument("--study", help="name of the comparison (default: the first folder's)")
    collecting.add_argument("--output", type=Path, required=True, help="the experiment's folder")
    reporting = actions.add_parser("report", help="tables.md and a figure for each study, from runs.jsonl")
    reporting.add_argument("folder", type=_with_runs, help="the experiment's folder")
    actions.add_parser("pages", help="write again the numbers and tables that pages take from all runs")
    arguments = parser.parse_args()
    from experiments.evidence import collect
    from experiments.tables import report

    if arguments.action == "pages":
        from experiments.pages import renew

        print("\n".join(map(str, renew())) or "every page has the numbers of its rows")
    elif arguments.action == "collect":
        study = arguments.study or arguments.sweeps[0].resolve().name
        print(f"{arguments.output}: {collect(arguments.sweeps, study, arguments.output)} runs of {study}")
    else:
        for path in report(arguments.folder):
            print(path)


if __name__ == "__main__":
    main()

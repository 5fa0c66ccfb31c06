"""Add finished and diverged runs of sweeps to this study's rows, with what they logged about matrices.

python -m experiments.verdict.collect 20 outputs/sweeps/verdict_a_* outputs/sweeps/verdict_more_*

The first argument is the study: 5, 20, again, cells, recovery or 40. A row is that of `python -m experiments
collect` plus `matrices`: the last line of the run's log (`experiments.verdict.arms`), without the singular values.
"""

import argparse
import json
from pathlib import Path

from experiments import evidence
from experiments.verdict.arms import LOG
from experiments.verdict.reference import read_log
from pc.command import exit_on_user_error
from pc_recipe.files.atomic import write_atomically

FOLDER = Path("experiments/verdict")


def matrices_of(run: Path) -> dict:
    """{layer: numbers} at the run's end, rounded to five digits, so that the rows of all runs stay small."""
    matrices = list(read_log(run).values())[-1]
    for numbers in matrices.values():
        numbers["weight"].pop("sigma", None)
    return json.loads(json.dumps(matrices), parse_float=lambda text: float(f"{float(text):.5g}"))


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study")
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of sweeps, the reference's first")
    arguments = parser.parse_args()
    count = evidence.collect(arguments.sweeps, arguments.study, FOLDER)
    rows = [json.loads(line) for line in (FOLDER / "runs.jsonl").read_text().splitlines()]
    for row in rows:
        run = Path(row["resolved"]["job"]["dump_folder"])
        if row["study"] == arguments.study and (run / LOG).exists():  # another study's row may name this folder
            row["matrices"] = matrices_of(run)
    write_atomically(FOLDER / "runs.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    print(f"{FOLDER / 'runs.jsonl'}: {count} runs of {arguments.study}")


if __name__ == "__main__":
    main()

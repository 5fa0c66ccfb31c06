"""Make a reference for `experiments.verdict.arms.Dial` from the logs of several runs: their mean at each logged step.

python -m experiments.verdict.reference RUN... --output FILE.json

It holds, for o and the FFN matrices, the singular values divided by their norm, the Frobenius norm, and the length of a step
relative to it. The same logs give the same file.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from experiments.verdict.arms import LOG
from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.files import json_lines
from pc_recipe.files.atomic import write_atomically


def read_log(run: Path) -> dict[int, dict[str, dict]]:
    """{step: {layer: numbers}} of a run, sorted by step; the last line of a step counts."""
    if not (run / LOG).is_file():
        raise UserError(f"{run / LOG} does not exist; is experiment.arm one of experiments.verdict.arms?")
    return dict(sorted({line["step"]: line["matrices"] for line in json_lines.read(run / LOG)}.items()))


def mean_of(runs: list[Path]) -> dict:
    """The content of a reference file."""
    logs = [read_log(run) for run in runs]
    steps = list(logs[0])
    if any(list(log) != steps for log in logs):
        raise UserError("the runs' logs have different steps; is one unfinished?")
    curves: dict[str, dict[str, list]] = {}
    for name in [name for name, line in logs[0][steps[0]].items() if "sigma" in line["weight"]]:
        lines = [[log[step][name] for step in steps] for log in logs]
        sigma = np.array([[line["weight"]["sigma"] for line in run] for run in lines])  # [runs, steps, values]
        spectra = (sigma / np.linalg.norm(sigma, axis=-1, keepdims=True)).mean(0)
        norms = np.array([[line["weight"]["norm"] for line in run] for run in lines]).mean(0)
        changes = np.array([[line["change"]["norm"] for line in run] for run in lines]).mean(0)
        numbers = {"spectrum": spectra, "norm": norms, "change": changes}
        curves[name] = {
            key: np.vectorize(lambda x: float(f"{x:.8g}"))(value).tolist() for key, value in numbers.items()
        }
    return {"runs": list(map(str, runs)), "steps": steps, "matrices": curves}


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs of one arm, of no test seed")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    write_atomically(arguments.output, json.dumps(mean_of(arguments.runs)) + "\n")
    print(arguments.output)


if __name__ == "__main__":
    main()

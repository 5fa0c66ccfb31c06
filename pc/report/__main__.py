"""Are the matrices of a model badly conditioned, and what would PC change?

Usage: python -m pc.report MODEL [OTHER...] [--output FILE] [--sample N] [--json] [--base FOLDER]
"""

import argparse
import json
import sys
from pathlib import Path

from pc.command import exit_on_user_error
from pc.errors import UserError


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of layers, at least 1")
    return int(text)


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pc.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="MODEL",
        help="folder of a Hugging Face model or of a LoRA adapter; file of tensors: .safetensors, .bin, .pt",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    parser.add_argument("--sample", type=_count, metavar="N", help="measure N layers only, evenly chosen")
    parser.add_argument("--json", action="store_true", help="print every matrix as JSON in place of the tables")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="the model that an adapter changes")
    arguments = parser.parse_args()
    if arguments.output.is_symlink():  # a report.html in someone else's model folder may be a link to anything
        raise UserError(f"{arguments.output} is a link; give another --output")
    try:
        from pc.report import page, terminal
        from pc.report.read import read
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is missing; in the checkout: pip install '.[report]'") from None
    from pc.measure import conditioning

    # all are looked at before the first is measured
    checkpoints = [read(path, arguments.base) for path in arguments.models]
    names = [checkpoint.name for checkpoint in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in arguments.models]
    models = {
        name: conditioning(checkpoint.model, checkpoint.load, arguments.sample, terminal.announce_and_watch)
        for name, checkpoint in zip(names, checkpoints, strict=True)
    }
    if arguments.json:
        print(json.dumps({name: found.as_dict() for name, found in models.items()}, indent=1))
    else:
        terminal.show(models)
    page.write(models, arguments.output)
    print(arguments.output, file=sys.stderr)


if __name__ == "__main__":
    main()

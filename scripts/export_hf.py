"""Write a checkpoint of a run as a Hugging Face folder that every tool loads as an ordinary Llama.

Usage: python scripts/export_hf.py RUN OUT [--dtype bfloat16] [--tokenizer T] [--scores TABLE]
"""

import argparse
import signal
import sys

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import existing


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "source", type=existing, metavar="RUN", help="a run, for its newest checkpoint, or RUN/checkpoint/step-N"
    )
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of the weights (default: float32)",
    )
    parser.add_argument("--tokenizer", help="as for tokenize_text.py (default: that of the run's data folder)")
    parser.add_argument("--scores", type=existing, metavar="TABLE", help="the table.md of score.py, for the model card")
    arguments = parser.parse_args()
    from pc_recipe.evaluate.hugging_face import export

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves no partial export
    print(export(**vars(arguments)))


if __name__ == "__main__":
    main()

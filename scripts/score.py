"""Score models on the paper's nine zero-shot tasks and write a table.

Usage: python scripts/score.py [NAME=]MODEL... [--data DIR] [--limit N] [--output DIR] [--tasks a,b]

MODEL is a run, a checkpoint of it (RUN/checkpoint/step-N) or a Hugging Face folder. Alternate baseline and preconditioned
models: the better of each pair is marked, if its lead exceeds a paired standard error. A repeated command scores only
what is missing.
"""

import argparse

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one
from pc_recipe.files.run_folder import parse_model


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL")
    parser.add_argument("--data", help="folder of scripts/fetch_eval_data.py (default: the Hub)")
    parser.add_argument("--limit", type=at_least_one, help="first items of each task, for a quick look (default: all)")
    parser.add_argument("--output", default="outputs/scores", help="default: outputs/scores")
    parser.add_argument("--tasks", help="comma-separated; default: the paper's nine")
    parser.add_argument("--batch-size", type=at_least_one, default=16, help="requests per forward pass (default: 16)")
    arguments = vars(parser.parse_args())
    for model in arguments["models"]:
        parse_model(model)  # answered before torch is imported
    from pc_recipe.evaluate.score import score

    if (tasks := arguments.pop("tasks")) is not None:
        arguments["names"] = [name.strip() for name in tasks.split(",") if name.strip()]
    *results, table = score(arguments.pop("models"), **arguments)
    print(table.read_text())
    print(*results, table, sep="\n")


if __name__ == "__main__":
    main()

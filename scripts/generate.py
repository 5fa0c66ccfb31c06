"""Sample text from a checkpoint of a run or from an export.

Usage: python scripts/generate.py MODEL "prompt" [--max-new-tokens N] [--temperature T] [--top-p P] [--seed S]
"""

import argparse

from pc.common.errors import exit_on_user_error


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="RUN/checkpoint/step-N or a Hugging Face folder")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the most likely token")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from pc.evaluate.generate import generate

    print(generate(**vars(arguments)))


if __name__ == "__main__":
    main()

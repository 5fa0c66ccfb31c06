"""Sample text from a checkpoint of a run or from an export; the same seed gives the same text.

Usage: python scripts/generate.py MODEL "prompt" [--max-new-tokens N] [--temperature T] [--top-p P] [--seed S]
"""

import argparse

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one, existing


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=existing, help="a run, RUN/checkpoint/step-N or a Hugging Face folder")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=at_least_one, default=100, help="fewer if the model ends the document")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the most likely token")
    parser.add_argument("--top-p", type=float, default=0.95, help="sample the likeliest, of this total probability")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from pc_recipe.evaluate import hugging_face
    from pc_recipe.evaluate.generate import continue_text

    llama, tokenizer = hugging_face.load(arguments.model)
    how = arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.seed
    print(continue_text(llama, tokenizer, arguments.prompt, *how))


if __name__ == "__main__":
    main()

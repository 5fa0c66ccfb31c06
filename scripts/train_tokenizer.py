"""Train a small tokenizer on your own text, for models that are small compared with a large vocabulary.

python scripts/train_tokenizer.py --input text/ --vocab-size 4096 --output tokenizers/mine-4096
"""

import argparse

from pc.command import exit_on_user_error
from pc_recipe.config.command_line import at_least_one


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level BPE tokenizer on text.")
    parser.add_argument(
        "--input",
        dest="sources",
        metavar="INPUT",
        nargs="+",
        required=True,
        help="as for tokenize_text.py",
    )
    parser.add_argument("--output", required=True, help="folder for the tokenizer")
    parser.add_argument(
        "--vocab-size", type=at_least_one, required=True, help="entries, including BOS, EOS and 256 bytes"
    )
    parser.add_argument("--megabytes", type=at_least_one, default=50, help="text to train on (default: %(default)s)")
    parser.add_argument("--text-key", default="text", help="as for tokenize_text.py (default: %(default)s)")
    options = parser.parse_args()
    from pc_recipe.data.train_tokenizer import train_tokenizer

    entries = train_tokenizer(**vars(options))
    print(
        f"{options.output}: {entries:,} entries. Next: scripts/tokenize_text.py --tokenizer {options.output}; then train with "
        f"--model.vocab_size {entries}"
    )


if __name__ == "__main__":
    main()

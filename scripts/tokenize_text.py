"""Tokenise text into shards for training: tables, JSON lines, plain text or Markdown, or a dataset of the Hub.

A folder of your own, with files of any of these kinds:
    python scripts/tokenize_text.py --input ~/texts --output data/own_text
A subset of FineWeb from the Hub, on every core of this machine:
    python scripts/tokenize_text.py --input HuggingFaceFW/fineweb --subset sample-10BT --output data/fineweb
Its first 10,000 documents, for a look within seconds:
    python scripts/tokenize_text.py --input HuggingFaceFW/fineweb --max-documents 10000 --output data/look
Several inputs, with Llama 2's tokenizer:
    python scripts/tokenize_text.py --input parquet/*.parquet notes --output data/mine --tokenizer Llama-2-7b-hf
On 64 machines of a SLURM cluster, each doing its share:
    sbatch --array=0-63 --cpus-per-task=32 --wrap "python scripts/tokenize_text.py --input … --output …"

A file's extension, before any .gz, .zst, .bz2, .xz or .lz4, says what it holds: .parquet, .arrow, .csv and JSON lines
(.jsonl, .json, .ndjson) have a document in each row, under --text-key; a .txt or .md file is one document, or several of
8,192 to 16,384 characters, cut at blank lines if there are any. There CRLF becomes LF; rows keep theirs. A byte that is
not UTF-8 becomes U+FFFD, and is counted.

After any interruption, repeat the command to continue.
"""

import argparse
import os
import re
import signal
import sys
import time

from pc.command import exit_on_user_error
from pc.errors import UserError
from pc_recipe.config.command_line import at_least_one


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        dest="sources",
        metavar="INPUT",
        nargs="+",
        action="extend",
        required=True,
        help="files, folders, or Hub datasets owner/name",
    )
    parser.add_argument("--subset", help="named subset of a Hub dataset, such as sample-10BT or CC-MAIN-2023-50")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument(
        "--tokenizer",
        default="mistral-common",
        help="folder with tokenizer.json, SentencePiece .model file, tiktoken encoding, or "
        "%(default)s (default; 32,000 entries)",
    )
    parser.add_argument(
        "--text-key", default="text", help="column of parquet and CSV, key of JSON lines (default: %(default)s)"
    )
    parser.add_argument(
        "--validation-fraction",
        type=float,
        help="share of the documents, chosen by the hash of their text (default: 0.0005; for small data, enough for "
        "64 sequences of 8192 tokens, up to a tenth)",
    )
    parser.add_argument(
        "--shard-megabytes", type=at_least_one, default=256, help="text per shard (default: %(default)s)"
    )
    parser.add_argument(
        "--max-documents", type=at_least_one, help="only this many, from the start of the first file (default: all)"
    )
    parser.add_argument(
        "--processes",
        type=at_least_one,
        default=len(os.sched_getaffinity(0)),
        help="(default: one per core)",
    )
    parser.add_argument(
        "--part",
        type=_parse_part,
        help="K/N: do share K = 0 … N-1 of the work (default: that of this SLURM array task, else all)",
    )
    parser.add_argument(
        "--engine",
        choices=("tokenizers", "fastokens"),
        default="tokenizers",
        help="what encodes: fastokens is faster, needs `pip install fastokens`, and is compared with tokenizers as it goes "
        "(default: %(default)s)",
    )
    options = parser.parse_args()
    options.part = options.part or _default_part()
    if not 0 <= (options.validation_fraction or 0) < 1:
        parser.error(f"--validation-fraction {options.validation_fraction} is a share of the documents, below 1")
    from pc_recipe.data.inspection import describe
    from pc_recipe.data.tokenizing import tokenize

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes end with it
    start = time.perf_counter()
    try:
        manifest = tokenize(**vars(options))
    except KeyboardInterrupt:
        print("\nStopped. The same command continues with the shards that are missing.", file=sys.stderr)
        sys.exit(130)
    minutes = (time.perf_counter() - start) / 60
    if manifest is None:
        print(
            f"Part {options.part[0]}/{options.part[1]} is done after {minutes:.1f} minutes; {options.output} is complete when all are."
        )
        return
    print(f"{options.output} is complete ({minutes:.1f} minutes):")
    print(describe(manifest))
    if not manifest.tokens("validation") and options.validation_fraction != 0:
        print("No document was chosen for validation: give a larger --validation-fraction and another --output.")
    print(f"Inspect it with: python scripts/inspect_data.py {options.output}")


def _default_part() -> tuple[int, int]:
    """(K, N) of the SLURM array task that this process is, or of all the work.

    Raises:
        UserError: nothing says how many tasks of the array come before this one, as with --array=3,7,12, or with
            --array=5, which may repeat one of many.
    """
    words = ("ID", 0), ("MIN", 0), ("MAX", 0), ("STEP", 1), ("COUNT", 1)
    number, first, last, step, count = (int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", one)) for name, one in words)
    if (last - first) // step != count - 1 or (count == 1 and number):
        raise UserError(
            f"task {number} of this SLURM array could have any share; give --array=0-{count - 1}, or --part K/{count}"
        )
    return (number - first) // step, count


def _parse_part(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not int(numbers[1]) < int(numbers[2]):
        raise argparse.ArgumentTypeError(f"{text} must be K/N with K from 0 to N - 1")
    return int(numbers[1]), int(numbers[2])


if __name__ == "__main__":
    main()

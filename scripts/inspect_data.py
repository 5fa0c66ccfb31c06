"""Inspect a folder of token shards: its sources, some documents, lengths, tokens, checksums.

python scripts/inspect_data.py data/demo
python scripts/inspect_data.py data/demo --documents 10 --plot outputs/demo-lengths
"""

import argparse

from pc.data.inspection import inspect
from pc.errors import exit_on_user_error


@exit_on_user_error
def main() -> None:
    parser = argparse.ArgumentParser(description="Inspect a folder of token shards.")
    parser.add_argument("folder")
    parser.add_argument("--documents", type=int, default=3, help="how many to show (default: %(default)s)")
    parser.add_argument(
        "--plot",
        help="path of the plot of document lengths, a PNG (default: FOLDER/document-lengths)",
    )
    options = parser.parse_args()
    inspect(options.folder, options.documents, options.plot)


if __name__ == "__main__":
    main()

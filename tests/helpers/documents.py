"""The documents, and which of their paragraphs tell of the past."""

import re
from collections.abc import Iterator

from helpers.tiny import ROOT

PLACES = ("*.md", "docs/*.md", "benchmarks/*.md", "results/*/README.md", "experiments/*/README.md")
DOCUMENTS = sorted(str(file.relative_to(ROOT)) for place in PLACES for file in ROOT.glob(place))
_COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b")


def paragraphs(document: str) -> Iterator[tuple[str, bool]]:
    """Each, and whether it may name what was: it names a commit, or the page does and is one of results or of a study.

    A table's row is one, and a block of commands, whose long lines are joined.
    """
    text = (ROOT / document).read_text().replace("\\\n", " ")
    past = document.startswith(("results/", "experiments/")) and bool(_COMMIT.search(text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\| )", text):
        yield paragraph, past or bool(_COMMIT.search(paragraph))

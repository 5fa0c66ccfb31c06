"""The documents, and which of their paragraphs may describe the past."""

import re
from collections.abc import Iterator

from helpers.tiny import ROOT

PLACES = ("*.md", "docs/*.md", "benchmarks/*.md", "results/*/README.md", "experiments/*/README.md", "findings/*.md")
DOCUMENTS = sorted(str(file.relative_to(ROOT)) for place in PLACES for file in ROOT.glob(place))
_COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b")


def paragraphs(document: str) -> Iterator[tuple[str, bool]]:
    """Each paragraph, and whether it may name what is gone: it names a commit, or its page does and is of results or a study.

    A table row is a paragraph, and so is a block of commands, whose continued lines are joined.
    """
    text = (ROOT / document).read_text().replace("\\\n", " ")
    past = document.startswith(("results/", "experiments/")) and bool(_COMMIT.search(text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\| )", text):
        yield paragraph, past or bool(_COMMIT.search(paragraph))

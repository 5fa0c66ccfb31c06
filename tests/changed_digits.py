"""Change the measured digits of pages one by one: which changes would the tests notice? It takes a minute and changes no file.

    python tests/changed_digits.py                     # the share that is found, by page
    python tests/changed_digits.py docs/should-i.md    # and each digit that is not found, and what counts as not measured

A digit counts as measured unless it is in code, in a link's target, in a plan, in a paragraph or table whose numbers are given by
others or by a setting (`experiments.pages`), or in what `NOT_MEASURED` matches: settings, names, dates, sizes. A change is found if the page is no
longer what `python -m experiments pages` would write, or has a number without a mark.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments import pages  # noqa: E402
from pc.errors import UserError  # noqa: E402

PAGES = [
    "README.md",
    "docs/should-i.md",
    "docs/comparing.md",
    "docs/performance.md",
    "experiments/verdict/README.md",
]
OURS = "<!--given: no record"
NUMBER = r"\d[\d.,]*"
LIST = rf"{NUMBER}(?:(?:,| and| or| to|;) {NUMBER})*"
NOT_MEASURED = re.compile(
    "|".join(
        [
            r"\b[A-Za-z_][A-Za-z_.-]*\d[\w.-]*",  # names with digits, and commits that begin with a letter
            r"\b(?=\d*[a-f])\d[0-9a-f]{6}\b",  # commits
            r"\b\d+\.\d+\.\d+(?:\+cpu)?",  # versions
            r"\d{4}-\d\d-\d\d",
            r"\b\d+(?:\.\d+)? ?[kMB]\b",  # sizes of models
            rf"\b{LIST} (?:tokens|bytes|seeds|steps|sequences|GPUs?|ranks|processes|layers|micro-batches|parameters)\b",
            rf"\b(?:[Ww]idths?|[Ll]evels?|[Ss]eeds?|[Pp]ython|[Rr]ung|[Aa]t|depth|p =|n =|commit|family|model|step|iterations?|with) {LIST}(?! %)",
            r"\b(?:8e-3|1\.131e-2|1\.6e-2|2e-2|2\.263e-2|2\.828e-2|4e-2|4\.525e-2|6\.4e-2)\b",  # learning rates
            r"\b95\s%",
            r"±\d\.\d+",  # margins
            rf"{NUMBER} × {NUMBER}(?: × {NUMBER})?|\[[\d, ]+\]|2abc",  # shapes
            rf"\b{NUMBER} matrices|default {NUMBER}|\b1\.6 and 1\.8 times",
            rf"busiest of {NUMBER}|\bon {LIST}(?= (?:and|ranks))|equal share is 12\.5",
        ]
    )
)


def unmeasured(page: str) -> list[tuple[int, int]]:
    """[start, end) of what counts as not measured."""
    spans = [(0, page.find("\n## Results\n") + 1)]
    not_text = r"<!--.*?-->|```.*?```|`[^`]+`|\]\(\S+?\)|^#+ [^\n]*$|^ {4}[^\n]*$"
    spans += [match.span() for match in re.finditer(not_text, page, re.DOTALL | re.MULTILINE)]
    start = 0
    for block in re.split(f"({pages.BLOCK.pattern})", page):
        lines = block.split("\n") if block.startswith("|") else [block]
        for line in lines:
            if any(pages.GIVEN in one and OURS not in one for one in (lines[0], line)):
                spans.append((start, start + len(line)))
            start += len(line) + 1
        start -= 1
    return spans + [match.span() for match in NOT_MEASURED.finditer(page)]


def marked(page: str) -> list[tuple[int, int]]:
    """[start, end) of the numbers and tables that marks give."""
    spans = []
    for mark in pages.MARK.finditer(page):
        found = pages.value(mark["expression"])
        at_table = (mark.start("table"), mark.end())
        spans.append(at_table if found.startswith("|") else (mark.start() - len(found), mark.start()))
    return spans


def digits(page: str) -> Iterator[int]:
    """Positions of measured digits: all that a mark gives, and others unless they count as not measured."""
    is_marked, is_not = [
        {place for start, end in spans for place in range(start, end)} for spans in (marked(page), unmeasured(page))
    ]
    for match in re.finditer(r"\d", page):
        if match.start() in is_marked or match.start() not in is_not:
            yield match.start()


def is_found(page: str) -> bool:
    try:
        return pages.renewed(page) != page or bool(pages.unmarked(page))
    except UserError:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", default=PAGES)
    chosen = parser.parse_args()
    pages.value = cache(pages.value)
    total = found = 0
    for name in chosen.pages:
        page = (ROOT / name).read_text()
        measured = list(digits(page))
        missed = [i for i in measured if not is_found(f"{page[:i]}{(int(page[i]) + 1) % 10}{page[i + 1 :]}")]
        total, found = total + len(measured), found + len(measured) - len(missed)
        print(f"{name}: {len(measured) - len(missed)} of {len(measured)} changed digits are found", flush=True)
        if chosen.pages is not PAGES:
            lines = [page.count("\n", 0, i) + 1 for i in missed]
            for line in sorted(set(lines)):
                print(f"  line {line}, not found in {lines.count(line)}: {page.splitlines()[line - 1]}")
    print(f"all: {found / total:.1%} of {total}")


if __name__ == "__main__":
    main()

"""Pages whose numbers and tables are those of the rows: `python -m experiments pages` writes them again.

A mark is a comment, which a page does not show, with a Python expression whose names are in `NAMES`. A number, with its
interval if it has one, stands before its mark, and a table after it:

    PC ends 0.051 (0.042 to 0.060)<!--verdict_20["level-4 - baseline"]:.3f--> lower.

    <!--verdict_20.contrasts()-->
    | question | contrast | ...

Of other numbers, those with two decimals or more need `<!--given: SOURCE-->` in their paragraph, list item, table row or table's
header: they are another's measurement, a setting, or of a record that no file here keeps.
"""

import re
from pathlib import Path

from experiments import numbers
from experiments.power import powers
from experiments.verdict import dial
from pc.errors import UserError
from pc_recipe.files.atomic import write_atomically

ROOT = Path(__file__).parents[1]
PLACES = ("README.md", "docs/*.md", "results/README.md", "experiments/**/README.md")
NUMBER = r"[+-]?\d(?:[\d.,]*\d)?(?:e[+-]?\d+)?%?"
BLOCK = re.compile(r"\n\s*\n|\n(?=- )")
GIVEN = "<!--given: "
MARK = re.compile(rf"(?!{GIVEN})<!--(?P<expression>.+?)-->(?P<table>(?:\n\|.*)*)")
LOOKS_MEASURED = re.compile(r"(?<![\w.])(?<!Python )\d+\.\d\d+(?![\d.]*e|\.\d)")


class Names(dict):
    """What a mark may name: functions, and studies with "_" for "-"."""

    def __missing__(self, name: str) -> numbers.Study:
        return {study.replace("-", "_"): one for study, one in numbers.studies().items()}[name]


NAMES = Names(
    abs=abs,
    adamw_tokens=numbers.adamw_tokens,
    cost=numbers.cost,
    count=numbers.count,
    cpu=numbers.cpu,
    dial=dial.table,
    figure=numbers.figure,
    final_difference=numbers.final_difference,
    gpu=numbers.gpu,
    loss_curve=numbers.loss_curve,
    min=min,
    power_iterations=numbers.power_iterations,
    powers=powers,
    precision=numbers.precision,
    released=numbers.released,
    table_of=numbers.table_of,
)


def pages() -> list[Path]:
    """The pages that have marks."""
    return [file for place in PLACES for file in sorted(ROOT.glob(place)) if MARK.search(file.read_text())]


def value(expression: str) -> str:
    """The text of a mark; a table begins with "|"."""
    text = eval(f"f'{{{expression}}}'", {"__builtins__": {}}, NAMES).strip()
    return text if text.startswith("|") else re.sub(r"(?<=\de)(-?)\+?0*(?=\d)", r"\1", text)  # 7.1e-15, 6.6e-7, 1e13


def renewed(page: str) -> str:
    """The text of a page with today's numbers and tables.

    Raises:
        UserError: before a mark there is no text with as many numbers as it gives.
    """
    text, end = "", 0
    for mark in MARK.finditer(page):
        text, end = text + page[end : mark.start()], mark.end()
        found, comment = value(mark["expression"]), f"<!--{mark['expression']}-->"
        if found.startswith("|"):
            text += f"{comment}\n{found}"
            continue
        pieces = map(re.escape, re.split(NUMBER, found))
        tail = text[-2 * len(found) - 20 :]  # all of `text` would take long
        old = re.search(rf"(?<![\w.]){NUMBER.join(pieces)}$", tail)
        if not old:
            raise UserError(f"{comment}: before it should stand {found}, not {text[-len(found) :]}")
        text = text.removesuffix(old[0]) + found + comment + mark["table"]
    return text + page[end:]


def unmarked(page: str) -> list[str]:
    """Numbers of a page that look measured and have neither a mark nor a source."""
    return [number for block in shown(page) for number in LOOKS_MEASURED.findall(block)]


def shown(page: str) -> list[str]:
    """The paragraphs, list items and table rows whose numbers need a mark, without those that have one, code and links. A plan,
    before "## Results", may have any number."""
    text = page.partition("\n## Results\n")[2] or page
    for mark in reversed(list(MARK.finditer(text))):
        found = value(mark["expression"])
        is_table = found.startswith("|")
        start, end = (mark.start(), mark.end()) if is_table else (mark.start() - len(found), mark.start("table"))
        text = text[:start] + text[end:]
    blocks = []
    for block in BLOCK.split(re.sub(r"```.*?```|\]\(\S+\)|`[^`]+`", "", text, flags=re.DOTALL)):
        lines = block.split("\n") if block.startswith("|") else [block]
        if GIVEN not in lines[0]:
            blocks += [line for line in lines if GIVEN not in line]
    return blocks


def renew() -> list[Path]:
    """Write each page whose numbers are not today's; returns these."""
    changed = []
    for file in pages():
        old = file.read_text()
        try:
            new = renewed(old)
        except UserError as error:
            raise UserError(f"{file.relative_to(ROOT)}: {error}") from error
        if new != old:
            write_atomically(file, new)
            changed.append(file.relative_to(ROOT))
    return changed

"""What the documents name without a link exists: paths, keys, tests. `test_site.py` tests links, another file commands."""

import re

import pytest

from helpers.documents import DOCUMENTS, paragraphs
from helpers.tiny import ROOT
from pc_recipe.config.run_key import all_values
from pc_recipe.config.schema import Config

FOLDERS = "pc|scripts|tests|benchmarks|docs|examples|train_configs|results|experiments|findings"
KEYS = {"section.key", *all_values(Config())}
TESTS = "".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))
SECTIONS = "|".join(Config.model_fields.keys() - {"pc"})


def code_of(paragraph: str) -> str:
    """Commands and names: what is in a block or between backticks."""
    if re.match(r"```|    ", paragraph):
        return paragraph
    return "\n".join(re.findall(r"```.*?(?:```|$)|`[^`]+`", paragraph, re.DOTALL))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_and_tests(document):
    for paragraph, past in paragraphs(document):
        for name in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./*{{}},-]*\w(?![\w]|/<)", paragraph):
            begin, *choices = re.split(r"[{,}]", name)
            names = [begin + choice + choices[-1] for choice in choices[:-1]] or [name]
            there = all(any(ROOT.glob(one)) or (ROOT / one).exists() for one in names)
            assert there or past or "DATE" in name, f"{name} in: {paragraph}"
        for name in re.findall(r"`(test_\w+)`", paragraph):
            assert past or f"def {name}(" in TESTS, name
        for file, word in re.findall(r"(tests/[\w/]+\.py)[^`\n]*? -k (\w+)", paragraph):
            assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text()), f"{file} -k {word}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_keys(document):
    for paragraph, _ in paragraphs(document):
        code = code_of(paragraph)
        keys = re.findall(r"(?<!\S)--(\w+\.[\w.]+)", code)
        keys += re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)(?<!\.jsonl)(?: = [^`]*)?`", code)
        assert KEYS.issuperset(keys), keys


def test_quoted_errors_are_those_of_the_code():
    code = "".join(file.read_text() for file in ROOT.glob("pc/**/*.py"))
    code = re.sub(r'"[\s+()]*f?"', "", code)  # strings that go on in the next line
    rows = re.findall(
        r"^\| .* \| .* \| `(.*?)`", (ROOT / "docs/library.md").read_text().partition("## Mistakes")[2], re.M
    )
    pieces = [piece.strip(" ,;.") for row in rows for piece in row.split("...")]
    assert len(rows) == 9 and [piece for piece in pieces if piece not in code] == []

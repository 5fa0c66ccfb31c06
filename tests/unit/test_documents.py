"""What the documents name exists: linked files and headings, paths, keys, tests. Another file tests their commands."""

import re
from pathlib import Path

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


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            file = (ROOT / document).parent / path if path else ROOT / document
            assert file.exists() and (not anchor or anchor in anchors(file)), target


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

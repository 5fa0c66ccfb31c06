"""What the documents name is there: linked files and headings, paths, options of scripts, keys, tests.

A paragraph that names a commit may name files of that commit, and so may a page of results or of a study.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny import ROOT
from pc_recipe.config.run_key import all_values
from pc_recipe.config.schema import Config

PLACES = ("*.md", "docs/*.md", "benchmarks/*.md", "results/*/README.md", "experiments/*/README.md")
DOCUMENTS = sorted(str(file.relative_to(ROOT)) for place in PLACES for file in ROOT.glob(place))
FOLDERS = "pc|scripts|tests|benchmarks|docs|examples|train_configs|results|experiments"
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b")
KEYS = {"section.key", *all_values(Config())}
TESTS = "".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))
SECTIONS = "|".join(Config.model_fields.keys() - {"pc"})


def paragraphs(document: str) -> Iterator[tuple[str, bool]]:
    """Each, and whether it may name what was. A table's row is one, and a block of commands, whose long lines are joined."""
    text = (ROOT / document).read_text().replace("\\\n", " ")
    past = document.startswith(("results/", "experiments/")) and bool(COMMIT.search(text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\| )", text):
        yield paragraph, past or bool(COMMIT.search(paragraph))


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
def test_options(document):
    for paragraph, past in paragraphs(document):
        code = code_of(paragraph)
        keys = re.findall(r"(?<!\S)--(\w+\.[\w.]+)", code)
        keys += re.findall(rf"`((?:{SECTIONS})\.[a-z_.]+)(?<!\.jsonl)(?: = [^`]*)?`", code)
        assert KEYS.issuperset(keys), keys
        for script, words in re.findall(r"((?:scripts|benchmarks|tests)/[\w/]+\.py)([^`\n|;&]*)", code):
            source = (ROOT / script).read_text() if (ROOT / script).is_file() else ""
            for option in re.findall(r"(?<!\S)(--\w[\w-]*)(?![\w.-])", words.partition("#")[0]):
                known = option in source or option in ("--fast", "--soak", "--gpu", "--help")
                assert known or past, f"{script} {option}"

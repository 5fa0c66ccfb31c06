"""The site: `sphinx-build -W -c docs . build/site`. Its first page is the README, to which the order of all others is added."""

import dataclasses
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ORDER = {
    "Start": ["docs/should-i", "docs/own-text"],
    "PC in your code": ["docs/library", "docs/loops", "docs/owner", "docs/reference"],
    "Runs": ["docs/configuration", "docs/launch", "docs/evaluation"],
    "Studies": [
        "docs/method",
        "docs/report",
        "docs/analysis",
        "docs/comparing",
        "docs/reproduce",
    ],
    "Costs and limits": ["docs/performance", "SECURITY"],
    "The code": ["CONTRIBUTING", "tests/README", "benchmarks/README", "findings/README", "CHANGELOG"],
    "Records": ["results/README", "results/*/README", "experiments/*/README"],
}

project = html_title = "pc-layer"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = [f"{page}.md" for pages in ORDER.values() for page in [*pages, "README"]]
exclude_patterns = [".*", "build", "data", "outputs"]  # folders that need not be searched
html_theme = "furo"
html_copy_source = html_show_copyright = False
myst_heading_anchors = 4
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"


def add_order(app, name, source) -> None:
    """Lists of pages at the end of the README, which GitHub would show as code if they stood in the file."""
    if name == root_doc:
        for caption, pages in ORDER.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def finish_docstring(app, what, name, found, options, lines) -> None:
    """Blocks after a colon are code; fields that have a help text, as those of `PCConfig` do, are documented by it."""
    for i, line in enumerate(lines[:-2]):
        if line.endswith(":") and not line.endswith("::") and not lines[i + 1] and lines[i + 2].startswith(" " * 4):
            lines[i] += ":"
    if what == "class" and dataclasses.is_dataclass(found):
        helped = [field for field in dataclasses.fields(found) if "help" in field.metadata]
        lines += [f":param {field.name}: {field.metadata['help']}" for field in helped]


def add_index(app, error) -> None:
    """`index.html`, which servers show first."""
    if not error and app.builder.format == "html":
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app) -> None:
    app.connect("source-read", add_order)
    app.connect("autodoc-process-docstring", finish_docstring)
    app.connect("build-finished", add_index)

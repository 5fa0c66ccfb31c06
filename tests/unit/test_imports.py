"""Imports go one way, from each package to those below it, and the method imports only torch."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = [
    ["pc"],
    ["common"],
    ["settings"],
    ["data"],
    ["titan"],
    ["evaluate", "plan", "integrations"],
    ["launch"],
    ["sweep"],
    ["analysis"],
]
"""from bottom to top; "pc" is the top-level modules, the method"""
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
FILES = sorted((ROOT / "pc").rglob("*.py"))


def package_of(module: str) -> str:
    """ "titan" of pc.titan.loss; "pc" of pc.linear."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR_OF else "pc"


def imports_of(file: Path) -> set[str]:
    """Modules in a file's import statements, including those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" if node.module == "pc" else node.module for alias in node.names}
    return found


def wrong_imports(file: Path, module: str) -> list[str]:
    mine = package_of(module)
    wrong = []
    for name in imports_of(file):
        if name.split(".")[0] == "pc":
            theirs = package_of(name)
            if theirs != mine and FLOOR_OF[theirs] >= FLOOR_OF[mine]:
                wrong.append(name)
        elif mine == "pc" and name.split(".")[0] not in {"torch", *sys.stdlib_module_names}:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file):
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert not wrong_imports(file, module)


@pytest.mark.parametrize(
    ("text", "module"),
    [("from pc.titan import config", "pc.linear"), ("import numpy", "pc.muon"), ("import pc.launch", "pc.plan.cost")],
)
def test_a_wrong_import_is_found(tmp_path, text, module):
    (tmp_path / "planted.py").write_text(f"def f():\n    {text}\n")
    assert len(wrong_imports(tmp_path / "planted.py", module)) == 1

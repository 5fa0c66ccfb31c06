"""Imports go one way, from each package to those below it and between the modules of each; the method imports only torch."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = [
    ["pc"],
    ["pc.command"],
    ["pc.integrations", "pc.report"],
    ["pc_recipe"],
    ["pc_recipe.files"],
    ["pc_recipe.pages"],
    ["pc_recipe.config"],
    ["pc_recipe.data"],
    ["pc_recipe.checkpoints"],
    ["pc_recipe.train"],
    ["pc_recipe.evaluate"],
    ["pc_recipe.plan"],
    ["pc_recipe.runs"],
    ["pc_recipe.runs.sweep"],
    ["pc_recipe.report"],
]
"""from bottom to top; "pc" is the method"""
FLOOR_OF = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
FILES = sorted(file for package in ("pc", "pc_recipe") for file in (ROOT / package).rglob("*.py"))


def package_of(module: str) -> str:
    """ "pc_recipe.train" of pc_recipe.train.llama2; "pc" of pc.layer."""
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def imports_of(file: Path) -> set[str]:
    """Modules in a file's import statements, including those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" if is_package(node.module) else node.module for alias in node.names}
    return found


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).is_dir()


def wrong_imports(file: Path, module: str) -> list[str]:
    mine = package_of(module)
    wrong = []
    for name in imports_of(file):
        first = name.split(".")[0]
        if first in ("experiments", "scripts", "tests", "benchmarks", "helpers"):
            wrong.append(name)
        elif first in ("pc", "pc_recipe"):
            theirs = package_of(name)
            if theirs != mine and FLOOR_OF[theirs] >= FLOOR_OF[mine]:
                wrong.append(name)
        elif mine in ("pc", "pc.command") and first not in {"torch", *sys.stdlib_module_names}:
            wrong.append(name)
    return wrong


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_one_way(file):
    assert not wrong_imports(file, module_of(file))


def test_no_modules_import_each_other():
    modules = {module_of(file): file for file in FILES}
    imports = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports_of(file)} & modules.keys()
        for module, file in modules.items()
    }
    TopologicalSorter(imports).prepare()
    first, second = next((name, other) for name, others in imports.items() for other in others)
    with pytest.raises(CycleError):
        TopologicalSorter(imports | {second: {first}}).prepare()


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("from pc_recipe.train import llama2", "pc.layer"),
        ("import numpy", "pc.muon"),
        ("import pc_recipe.runs.local", "pc_recipe.train.llama2"),
        ("from experiments import evidence", "pc_recipe.report.curves"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, text, module):
    (tmp_path / "planted.py").write_text(f"def f():\n    {text}\n")
    assert len(wrong_imports(tmp_path / "planted.py", module)) == 1

"""Plant faults into the code, one at a time, and print those that the tests do not find:

    python tests/planted_faults.py [--faults 14] [--seed 0] [--minutes 60] [--tree FOLDER] [MODULE.py ...]

Faults are made from the syntax tree: an operator is swapped, a condition negated, a number shifted, a call or a
keyword argument dropped. The seed draws them by their text, so that an unchanged line keeps its faults. Each fault meets
the tests that run its statement, also in a command that they start, but at most three cases of one test function: first
those of `--fast`, then those of test files that belong to its module (`_shows`). They run in a fork of one process that
has imported torch, so that most faults cost seconds.
(mutmut leaves out decorated functions and wraps the others; cosmic-ray starts a process and imports torch for each.)
"""

import argparse
import ast
import copy
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

MODULES = ("pc/*.py", *(f"pc_recipe/train/{name}.py" for name in ("trainer", "optimizers", "nonfinite", "fsdp_sync")))
"""the core and the training step; a pattern that matches no file is ignored"""
GIVEN = {
    "pc/matrices.py": "checkpoint_report", "pc/measure.py": "checkpoint_report", "pc/shards.py": "hyperball_ranks",
    "pc/preconditioner.py": "loops|loops_ranks",
    "pc/watch.py": "preconditioner(_mistakes|_states)?|loops|loops_ranks|moved",
    "pc/step.py": "preconditioner|kept|gammas|loops_ranks|moved|second_start",
    "pc/method.py": "second_start|odd_matrices|effective_weight|half", "pc/inverse.py": "preserve",
    "pc/polynomial.py": "half", "pc/maps.py": "polynomial|half",
    "pc/assignment.py": "owner|owner_ranks|owner_counts|split_ranks",
    "pc_recipe/train/trainer.py": "nonfinite|stopping|training",
    "pc_recipe/plan/allocation.py": "slurm_decisions",
    "pc_recipe/data/inspection.py": "data_commands", "pc_recipe/data/train_tokenizer.py": "data_commands",
}  # fmt: skip
"""{module: its tests that neither have its name nor are in the folder of its package}"""
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NEGATED_BY_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
DROPPED = ("detach", "clone", "contiguous", "float", "double", "bool", "abs", "square", "sqrt")
"""methods whose tensor can stand in for their result"""
MESSAGES = ("logger.", "warnings.", "print(")
SLACK = 60.0  # seconds that a fault may add before it counts as found because it hangs
UNREADABLE = "the tests cannot be read"


@dataclass(frozen=True)
class Fault:
    module: str
    lines: range  # from the statement's first line to the fault's last
    in_function: bool
    shown: str  # one-line diff
    source: str  # of the whole module, with the fault


def faults_of(module: str, source: str) -> list[Fault]:
    """Every fault that can be planted in a module."""
    text, starts, found = source.encode(), [0], []
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node, statement, in_function: bool) -> None:
        if isinstance(node, ast.Raise | ast.JoinedStr) or ast.unparse(node) == "TYPE_CHECKING":
            return  # what only words a message, or does not run
        statement = node if isinstance(node, ast.stmt) else statement
        for part, new in _replacements(node):
            begin, end = (starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset)
            first, last = starts[part.lineno - 1], starts[part.end_lineno]
            old, shown = text[first:last].decode(), (text[first:begin] + new.encode() + text[end:last]).decode()
            shown = f"`{' '.join(old.split())}` → `{' '.join(shown.split())}`"
            lines = range(statement.lineno, part.end_lineno + 1)
            found.append(Fault(module, lines, in_function, shown, (text[:begin] + new.encode() + text[end:]).decode()))
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                    visit(child, statement, in_function or (isinstance(node, ast.FunctionDef) and name == "body"))

    visit(ast.parse(source), None, False)
    return found


def _replacements(node):
    """Pairs of a part of the node, and the text of a fault that replaces it."""

    def changed(**fields) -> str:
        result = copy.copy(node)
        for name, value in fields.items():
            setattr(result, name, value)
        return ast.unparse(result)

    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        yield node, changed(op=SWAPS[type(node.op)]())
    if isinstance(node, ast.Compare):
        yield node, changed(ops=[SWAPS[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and isinstance(value := node.value, int | float):
        shifted = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 1.01 or 1.0
        yield node, repr(shifted)
    if isinstance(node, ast.Attribute) and node.attr == "mT":
        yield node, ast.unparse(node.value)
    words = isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(MESSAGES)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not words:
        yield node, "pass"
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in DROPPED:
        yield node, ast.unparse(node.func.value)
    elif isinstance(node, ast.Call):
        for dropped in (keyword for keyword in node.keywords if keyword.arg not in (None, "strict")):
            yield node, changed(keywords=[keyword for keyword in node.keywords if keyword is not dropped])
    for test in [getattr(node, "test", None), *getattr(node, "ifs", [])]:
        swapped = isinstance(test, ast.Compare) and isinstance(test.ops[0], NEGATED_BY_SWAP)
        if test is not None and not swapped and not isinstance(test, ast.UnaryOp):
            yield test, f"not ({ast.unparse(test)})"


def trace(modules: dict[str, str], file: str) -> None:
    """From now on write each line of `modules` ({path: name}) once for each test that runs it: test, module, line in JSON."""
    seen = set()

    def line(frame, event, _):
        path, test = frame.f_code.co_filename, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if event == "line" and test and (key := (test, path, frame.f_lineno)) not in seen:
            seen.add(key)
            _write(file, test, modules[path], frame.f_lineno)
        return line if path in modules else None

    threading.settrace(line)
    sys.settrace(line)


def _write(file: str, *row) -> None:
    with open(file, "a") as stream:  # one short line per write, because other processes write too
        stream.write(json.dumps(row) + "\n")


COMMANDS = f"""
import json, os, sys
if "TRACED" in os.environ:
    sys.path.append({str(Path(__file__).parent)!r})
    import planted_faults
    planted_faults.trace(*json.loads(os.environ["TRACED"]))
    sys.path.pop()
"""
"""sitecustomize.py, with which every Python starts"""


class Watch:
    """A pytest plugin that writes the lines of `trace`, and each test's seconds and whether it failed."""

    def __init__(self, modules: dict[str, str], file: Path) -> None:
        self.modules, self.file, self.done = modules, file, set()

    def pytest_configure(self):
        os.environ["TRACED"] = json.dumps([self.modules, str(self.file)])  # of a fork, and of commands that it starts

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        trace(self.modules, str(self.file))  # anew for each test: hypothesis ends what traces
        return (yield)

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logreport(self, report):
        _write(str(self.file), report.nodeid, report.duration, bool(report.failed))


class Only:
    """A pytest plugin that runs these tests in this order, and writes the name of one that fails."""

    def __init__(self, tests: list[str], file: Path) -> None:
        self.order, self.file = {test: place for place, test in enumerate(tests)}, file

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.file.write_text(report.nodeid)


def run(words: list[str], plugin, seconds: float) -> int | None:
    """Run pytest in a fork; returns its status, or None if it was stopped after `seconds`."""
    if (child := os.fork()) == 0:
        os.setsid()
        log = os.open(plugin.file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(int(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0", *words], [plugin])))
    deadline, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)  # its ranks too
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(child, 0)
    return status


def tests_by_line(tree: Path, modules: list[str], file: Path) -> dict:
    """{(module, line, or None for any): {test: (not of --fast, seconds)}} of the tests that pass without a fault."""
    named = [path for path in (tree / "tests").rglob("test_*.py") if any(_shows(path, module) for module in modules)]
    seconds, failed, hits = defaultdict(float), set(), defaultdict(dict)
    watch, other = Watch({str(tree / module): module for module in modules}, file), {}
    for words in (["--fast"], [str(path) for path in sorted(named) if path.parent.name != "gpu"]):
        file.touch()
        run(words, watch, 3600)
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        watch.done |= {row[0] for row in rows}
        for test, *row in rows:
            other.setdefault(test, words != ["--fast"])
            if isinstance(row[1], bool):
                seconds[test] += row[0]
                failed |= {test} if row[1] else set()
        for test, module, line in (row for row in rows if not isinstance(row[2], bool)):
            if not other[test] or _shows(Path(test.partition("::")[0]), module):
                hits[module, line][test] = hits[module, None][test] = None
    print("".join(f"left out, because it fails without a fault: {test}\n" for test in sorted(failed)), flush=True)
    return {
        place: {test: (other[test], seconds[test]) for test in _some(tests.keys() - failed)}
        for place, tests in hits.items()
    }


def _shows(path: Path, module: str) -> bool:
    """Whether a test file has the module's name or one of `GIVEN`, or is in the folder of its package of the recipe."""
    package, *rooms, name = Path(module).with_suffix("").parts
    named = re.fullmatch(rf"test_({name}(_ranks)?|{GIVEN.get(module, '')})", path.stem)
    return bool(named) or package == "pc_recipe" and path.parent.name in rooms


def _some(tests: set[str]) -> list[str]:
    """At most three cases of each test function: the first, the middle and the last."""
    functions = defaultdict(list)
    for test in sorted(tests):
        functions[test.partition("[")[0]].append(test)
    return [test for cases in functions.values() for test in {cases[0], cases[len(cases) // 2], cases[-1]}]


def first_to_fail(fault: Fault, tests: dict, tree: Path, file: Path) -> str | None:
    """The first test that fails with a fault, or None."""
    target, only = tree / fault.module, Only(sorted(tests, key=lambda test: tests[test]), file)
    original = target.read_text()
    file.write_text(UNREADABLE)
    target.write_text(fault.source)
    files = dict.fromkeys(test.partition("::")[0] for test in only.order)
    status = run(["-x", *files], only, SLACK + 3 * sum(seconds for _, seconds in tests.values()))
    target.write_text(original)
    return None if status == 0 else "it takes too long" if status is None else file.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=MODULES, help="files or patterns (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=14, help="how many of each module (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="the repository, at any commit")
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time (default: %(default)s)")
    chosen, began = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree, file = Path(name) / "tree", Path(name) / "answer"
        top, left_out = str(chosen.tree), {".git", ".venv", "data", "outputs", "results"}
        shutil.copytree(top, tree, ignore=lambda folder, _: left_out if folder == top else {"__pycache__"})
        _prepare(tree)
        modules = sorted({str(path.relative_to(tree)) for one in chosen.modules for path in tree.glob(one)})
        print(time.strftime("%H:%M:%S"), "running the tests once, to see which lines each runs", flush=True)
        tests = tests_by_line(tree, modules, file)
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        for module in map(Path, modules):
            for compiled in (tree / module).parent.glob(f"__pycache__/{module.stem}.*"):
                compiled.unlink()  # Python would use it if a fault keeps the size of the file
        places, drawn = {}, []
        for module in modules:
            places[module] = faults_of(module, (tree / module).read_text())
            by_text = sorted(places[module], key=lambda fault: _hash(f"{chosen.seed} {fault.shown}"))
            drawn += enumerate(by_text[: chosen.faults])
        counts, survivors = {module: [len(places[module]), 0, 0, 0] for module in modules}, []
        for _, fault in sorted(drawn, key=lambda one: one[0]):  # modules take turns: each gets a share
            if time.monotonic() > began + 60 * chosen.minutes:
                break
            mine = {k: v for line in fault.lines for k, v in tests.get((fault.module, line), {}).items()}
            mine = mine if fault.in_function else tests.get((fault.module, None), {})
            by = first_to_fail(fault, mine, tree, file) if mine else None
            found = by is not None
            row = counts[fault.module]
            row[1:] = [row[1] + 1, row[2] + (found and not mine.get(by, (False,))[0]), row[3] + found]
            line = f"- {fault.module}:{fault.lines[-1]} {fault.shown}: {by or f'{len(mine)} tests pass'}"
            print(time.strftime("%H:%M:%S"), line, flush=True)
            survivors += [] if found else [line]
        print(_tables(counts, survivors))


def _prepare(tree: Path) -> None:
    """Import torch and TorchTitan once, import everything else from the copied tree, and start ranks as forks."""
    os.chdir(tree)
    Path("sitecustomize.py").write_text(COMMANDS)
    sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import hypothesis  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch
    import torchtitan.train  # noqa: F401

    assert not any(name.partition(".")[0] == "pc" for name in sys.modules)
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork


def _tables(counts: dict[str, list[int]], survivors: list[str]) -> str:
    rows = counts | {"all": [sum(column) for column in zip(*counts.values(), strict=True)]}
    lines = ["| module | places | faults | found by `--fast` | found | share of `--fast` | share |", "|---" * 7 + "|"]
    for module, (places, faults, *found) in rows.items():
        shares = [f"{one / max(faults, 1):.0%}" for one in found]
        lines.append(f"| {' | '.join(map(str, [module, places, faults, *found, *shares]))} |")
    return "\n".join([*lines, "", *sorted(survivors), ""])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()

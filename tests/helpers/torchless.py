"""Commands that answer before torch is imported, which takes seconds."""

import subprocess
import sys

from helpers.tiny import ROOT


def run_without_torch(code: str) -> tuple[int, str]:
    """(status, output) of a command in a new process; asserts that it imported neither torch nor TorchTitan."""
    code = f"import runpy, sys\n{code}\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    *said, modules = done.stdout.splitlines()
    assert "pc.errors" in modules.split() and not {"torch", "torchtitan"} & set(modules.split())
    return done.returncode, "\n".join(said) + done.stderr


def launch(*words) -> tuple[int, str]:
    return run_without_torch(f"from pc_recipe.runs import local; sys.argv[1:] = {list(words)!r}\ntry: local.main()")

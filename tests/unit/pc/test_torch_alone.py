"""The library in a process that can import only torch and the standard library; importing it patches nothing."""

import shutil
import subprocess
import sys

import pytest

from helpers.tiny import ROOT

ALONE = """
import io, sys
from importlib.machinery import PathFinder

torch_brings = {"torch", "torchgen", "functorch", "typing_extensions", "filelock", "fsspec", "jinja2", "markupsafe",
                "networkx", "sympy", "mpmath", "setuptools", "pkg_resources"}

class TorchAlone:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names | torch_brings | {"pc", "pc_recipe"} or top.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [TorchAlone if finder is PathFinder else finder for finder in sys.meta_path]
import torch
before = set(sys.modules)
import pc
# slow imports happen on use; the rest is this package and a few small modules
heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy", "numpy")
new = set(sys.modules) - before
assert not [name for name in new if name.startswith(heavy)], new
assert not [name for name in new if name.startswith("torch")], new

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
model = pc.attach(model, pc.PCConfig(blocks=("0*", "2*")))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
preconditioner, x = pc.precondition(model, optimizer), torch.randn(5, 6)
before = model(x)
before.square().mean().backward()
preconditioner.pull_back()
optimizer.step()
assert model(x).square().mean() < before.square().mean()
file = io.BytesIO()
torch.save([model.state_dict(), optimizer.state_dict()], file)
file.seek(0)
for part, state in zip((model, optimizer), torch.load(file, weights_only=True)):
    part.load_state_dict(state)
outputs = model(x)
torch.testing.assert_close(pc.merge(model)(x), outputs)
try:
    import pc_recipe
except ImportError as error:
    assert ".[recipe]" in str(error), error
else:
    raise AssertionError("pc_recipe")
"""

UNPATCHED = """
import torchtitan.tools.utils as utils, torchtitan.train, torchtitan.components.metrics as metrics
names = [(utils, "device_type"), (utils, "device_module"), (utils, "get_peak_flops"), (metrics, "device_type"),
         (torchtitan.train, "ensure_pp_loss_visible")]
before = [getattr(module, name) for module, name in names]
import pc_recipe.runs.worker
assert [getattr(module, name) for module, name in names] == before
"""


def run(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_alone_trains_saves_and_loads():
    run(ALONE)


def test_nothing_is_patched_on_import():
    run(UNPATCHED)


@pytest.mark.soak
def test_the_installed_core_passes_its_tests(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "pc", tmp_path / "pc")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path / "site", tmp_path]
    subprocess.run(install, check=True)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    subprocess.run([ROOT / "tests" / "core_from_wheel.sh", python], check=True)

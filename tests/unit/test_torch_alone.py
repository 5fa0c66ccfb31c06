"""The library in a process that can import only torch and the standard library; importing it patches nothing."""

import subprocess
import sys

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
        known = top in sys.stdlib_module_names | torch_brings | {"pc"} or top.startswith("_sysconfigdata")
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

def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
results = []
for schedule in ("forward", "step"):
    def start():
        model = pc.attach(new_model(), pc.PCConfig(blocks=("0*", "2*"), schedule=schedule))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return {"model": model, "optimizer": optimizer, "schedule": pc.schedule(model, optimizer)}

    def train(parts, steps):
        for _ in range(steps):
            parts["model"](x).square().mean().backward()
            parts["schedule"].pull_back()
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()

    first, file = start(), io.BytesIO()
    train(first, 2)
    torch.save({name: part.state_dict() for name, part in first.items()}, file)
    train(first, 2)
    file.seek(0)
    state, second = torch.load(file, weights_only=True), start()
    for name, part in second.items():
        part.load_state_dict(state[name])
    train(second, 2)
    outputs = [parts["model"](x) for parts in (first, second)]
    merged = pc.merge(first["model"])
    plain = new_model()
    plain.load_state_dict(merged.state_dict())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(plain(x), merged(x))
    torch.testing.assert_close(plain(x), outputs[0])
    results.append(plain(x))
torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)  # AdamW's square roots amplify float32 rounding
for package in ("titan", "data", "plan", "evaluate", "launch", "sweep", "common.plots", "analysis"):
    try:
        __import__(f"pc.{package}")
    except ImportError as error:
        assert isinstance(error, pc.UserError) and f"pc-layer[" in str(error), error
    else:
        raise AssertionError(package)
"""

UNPATCHED = """
import torchtitan.tools.utils as utils, torchtitan.train, torchtitan.components.metrics as metrics
names = [(utils, "device_type"), (utils, "device_module"), (utils, "get_peak_flops"), (metrics, "device_type"),
         (torchtitan.train, "ensure_pp_loss_visible")]
before = [getattr(module, name) for module, name in names]
import pc.launch.worker
assert [getattr(module, name) for module, name in names] == before
"""


def run(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_alone_trains_saves_and_loads():
    run(ALONE)


def test_nothing_is_patched_on_import():
    run(UNPATCHED)

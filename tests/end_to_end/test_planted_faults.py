"""`./run_tests.sh --fast` protects the method: it must fail with each of these faults planted in `pc/*.py`.

The training run among them is left out: it takes longest, and would find most. A table is printed: the fault, and the
first test that fails.
"""

import os
import shutil
import subprocess
import sys
import time

import pytest

from helpers.small_config import ROOT

# name: (module, text that occurs in it once, its replacement)
FAULTS = {
    "a coefficient of level 4 is off by 0.1 %": ("polynomial", "14.097", "14.111"),
    "gradient flows through the recovered norm": ("linear", "scale = s.detach()", "scale = s"),
    "gamma is forgotten beside the norm": ("linear", "scale is None else scale * gamma", "scale is None else scale"),
    "epsilon is 1e-4": ("spectral", "EPSILON = 1e-7", "EPSILON = 1e-4"),
    "one power-iteration step too few": ("spectral", "for _ in range(steps):", "for _ in range(steps - 1):"),
    "starting vectors are equal for all layers": ("spectral", "name.encode()", "b''"),
    "the tenth in the condition number is rounded down": ("spectral", "tenth = math.ceil(", "tenth = math.floor("),
    "a merged layer forgets requires_grad": (
        "attach",
        "requires_grad=layer.weight.requires_grad",
        "requires_grad=True",
    ),
    "a merged layer forgets eval mode": ("attach", "linear.train(layer.training)", "pass"),
    "a shared weight is preconditioned": ("attach", "    _refuse_shared_weights(modules, chosen)\n", ""),
    "W is written under unsharded parameters": (
        "step",
        "        self._reshard()\n        states = [self.layers[name]",
        "        states = [self.layers[name]",
    ),
    "a second pull_back goes through": ("step", "gradient is self._pulled_back", "False"),
    "loaded state of other layers is taken": ("step", "own.keys() != state_dict.keys()", "False"),
    "v is not updated": ("passes", "return weight.to(raw.dtype), u, v", "return weight.to(raw.dtype), u, rest[-1]"),
    "the gradient through s is left out": ("passes", "value=-1.0", "value=0.0"),
    "gamma's gradient lacks the norm": ("passes", "(s if config.norm_recovery else 1.0)", "1.0"),
    "every replica sends its copy": ("owner", "self.copies[rank] == self.copies[owner] and ", ""),
    "buckets have no limit": ("owner", "if held and held + sizes[index] > limit", "if False"),
    "the cheapest matrices are dealt out first": ("owner", "key=lambda i: -costs[i]", "key=lambda i: costs[i]"),
    "layer hooks run before the schedule's": (
        "optimizer_hooks",
        "[*_schedules, *_layers]:\n        observer.before",
        "[*_layers, *_schedules]:\n        observer.before",
    ),
    "nested optimizers refresh twice": ("linear", "if self._refreshed >= began:", "if False:"),
    "gamma stays in a plain state dict": (
        "linear",
        'for key in ("gamma", "u", "v"):\n                destination',
        'for key in ("u", "v"):\n                destination',
    ),
    "a start without norm recovery is allowed": ("start", "if not config.norm_recovery:", "if False:"),
    "momentum and its complement change places": (
        "muon",
        "local_gradients, 1 - momentum)",
        "local_gradients, momentum)",
    ),
}
ALLOWED_TO_PASS = 1


def _fast_tests(folder) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "--fast",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--deselect",
        "tests/golden",
    ]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.soak
def test_the_fast_tests_find_planted_faults(demo_data, tmp_path):
    left_out = shutil.ignore_patterns(".git", ".venv", "outputs", "data", "results", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=left_out)
    (tmp_path / "copy" / "data").mkdir()
    (tmp_path / "copy" / "data" / "demo").symlink_to(demo_data)
    start = time.monotonic()
    clean = _fast_tests(tmp_path / "copy")
    assert clean.returncode == 0, clean.stdout[-2000:]
    rows = [f"| none | | all pass, {time.monotonic() - start:.0f} s |"]
    passed = []
    for name, (module, old, new) in FAULTS.items():
        file = tmp_path / "copy" / "pc" / f"{module}.py"
        original = file.read_text()
        assert original.count(old) == 1, f"{name}: {original.count(old)} places in {file.name}"
        file.write_text(original.replace(old, new))
        done = _fast_tests(tmp_path / "copy")
        file.write_text(original)
        found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if not found:
            passed.append(name)
        test = found[0].split()[1].removeprefix("tests/") if found else "**not caught**"
        rows.append(f"| {name} | `pc/{module}.py` | {test if not found else f'`{test}`'} |")
        print(rows[-1], flush=True)
    print("\n".join(rows))
    assert len(passed) <= ALLOWED_TO_PASS, passed

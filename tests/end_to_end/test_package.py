"""The package as others install it: sdist, the wheel made from it, and the core's tests on the wheel."""

import subprocess
import sys
import tarfile

import pytest

import pc
from helpers.tiny import ROOT


@pytest.mark.soak
def test_the_core_passes_its_tests_from_the_wheel(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path, ROOT], check=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert f"-{pc.__version__}-" in wheel.name
    with tarfile.open(sdist) as files:
        assert any(name.endswith("/pc/py.typed") for name in files.getnames())
    # an empty environment that sees only this one's torch and pytest
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    subprocess.run([ROOT / "tests" / "core_from_wheel.sh", python], check=True)

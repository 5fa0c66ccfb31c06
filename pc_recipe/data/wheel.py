"""Download data that a package's wheel contains, from the registry that pip uses."""

import os
import subprocess
import sys
from pathlib import Path

from pc.errors import UserError
from pc_recipe.files.atomic import sha256_of
from pc_recipe.files.own_code import own_code


def download_wheel(package: str, sha256: str, folder: Path) -> Path:
    """Download the wheel of `package` ("name==version") into `folder`; nothing is installed.

    Raises:
        UserError: pip gave no wheel, or one with another checksum.
    """
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own_code()})
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip downloaded no wheel"])[-1]
        raise UserError(f"pip could not download {package}: {reason}")
    if sha256_of(wheels[0]) != sha256:
        raise UserError(f"{wheels[0]}: SHA-256 differs from the published wheel of {package} ({sha256})")
    return wheels[0]

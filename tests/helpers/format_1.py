"""A data folder as versions before format 2 wrote it: the tokenizer's files as given, a checksum of the settings."""

import hashlib
import json
import shutil
from pathlib import Path


def make_format_1(folder: Path, given: dict[str, bytes], kind: str) -> Path:
    """Change a folder of format 2; its shards stay. given: {name: bytes} of the tokenizer's own files."""
    manifest = json.loads((folder / "manifest.json").read_text())
    job = json.loads((folder / "tokenizing.json").read_text())
    tokenizer = manifest["tokenizer"]
    digest = hashlib.sha256(f"{kind} bos={tokenizer['bos_id']} eos={tokenizer['eos_id']}".encode())
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    for name in sorted(given):
        digest.update(f"\n{name} {len(given[name])}\n".encode() + given[name])
        (folder / "tokenizer" / name).write_bytes(given[name])
    job["settings"] |= {"format": 1, "tokenizer": digest.hexdigest()}
    settings_sha256 = hashlib.sha256(json.dumps(job["settings"], sort_keys=True).encode()).hexdigest()
    manifest["tokenizer"] |= {"sha256": digest.hexdigest(), "kind": kind}
    manifest.pop("content_sha256", None)
    manifest |= {"format": 1, "configuration_sha256": settings_sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "tokenizing.json").write_text(json.dumps(job, indent=1))
    for file in (folder / "units").iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"settings_sha256": settings_sha256}, indent=1))
    return folder

"""A damaged or unsuitable data folder is refused by name, at the start or when the damaged part is read."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

from pc.errors import UserError
from pc_recipe.data import token_files
from pc_recipe.data.inspection import verify
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.files import look
from pc_recipe.files.errors import ReadFailed


@pytest.fixture
def folder(shards, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(shards.folder, tmp_path / "data")


def load(folder):
    return GlobalOrderLoader(folder, seq_len=16, local_batch_size=4, dp_rank=0, dp_world_size=1, vocab_size=32000)


def use(folder):
    """Reads the training split once."""
    loader = load(folder)
    iterator = iter(loader)
    for _ in range(loader.sequences.length // 4):
        next(iterator)


def test_a_truncated_shard_is_named_and_made_again(folder, parquet_folder):
    path = folder / "train" / "00002.tokens.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    for act in (lambda: use(folder), lambda: verify(Manifest.read(folder))):
        with pytest.raises(UserError, match=rf"00002.tokens.npy has {len(whole) - 10} bytes instead of {len(whole)}"):
            act()
    tokenize(str(parquet_folder), folder, validation_fraction=0.2)  # the advice in the message
    assert path.read_bytes() == whole


def test_an_id_above_the_vocabulary_is_found_by_reading(folder):
    path = folder / "train" / "00003.tokens.npy"
    content = bytearray(path.read_bytes())
    content[150:152] = Manifest.read(folder).tokenizer.vocab_size.to_bytes(2, "little")  # the smallest invalid id
    path.write_bytes(content)
    with pytest.raises(UserError, match="^[^\n]*00003.tokens.npy does not have the checksum [^\n]*$"):  # no traceback
        use(folder)


def test_a_replaced_tokenizer_is_refused(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_bytes())
    ids = content["model"]["vocab"]
    ids["▁the"], ids["▁and"] = ids["▁and"], ids["▁the"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not the one that made the shards"):
        Manifest.read(folder).load_tokenizer()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [(folder / f"{n}.json").unlink() for n in ("manifest", "tokenizing")], "not a folder of token"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 9}'), "format 9"),
    ],
)
def test_folder_without_a_usable_manifest(make, message, folder):
    make(folder)
    with pytest.raises(UserError, match=message):
        use(folder)


def test_a_shard_that_is_truncated_during_a_run_is_named(folder):
    loader = load(folder)
    os.truncate(folder / "train" / "00001.tokens.npy", 200)
    iterator = iter(loader)
    with pytest.raises(UserError, match="00001.tokens.npy ends before its"):
        for _ in range(loader.sequences.length // 4):
            next(iterator)


def test_a_shard_that_becomes_zeros_during_a_run_is_refused(folder, monkeypatch):
    """As after a crash of a file system: the size is right, and token 0 is valid, but a model soon learns to predict it."""
    hashed, real = [], token_files.sha256_of
    monkeypatch.setattr(token_files, "sha256_of", lambda path: hashed.append(path.name) or real(path))
    loader = load(folder)
    batches = iter(loader)
    next(batches)
    assert not hashed  # plausible tokens are not compared with the checksum
    for path in folder.glob("train/*.npy"):
        content = path.read_bytes()
        path.write_bytes(content[:128] + bytes(len(content) - 128))
    with pytest.raises(UserError, match="tokens.npy does not have the checksum"):
        next(batches)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails(folder, monkeypatch, number):
    """An error that passes is ignored; one that stays is reported as a failed read, not as damage: a retry may help."""
    monkeypatch.setattr(look, "PAUSES", (0.0, 0.0))
    real, left = np.fromfile, [2 * (number != errno.EACCES)]

    def fromfile(*arguments, **options):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(np, "fromfile", fromfile)
    use(folder)
    left[0] = 10**6
    with pytest.raises(ReadFailed, match=f"^[^\n]*tokens.npy: could not be read .{os.strerror(number)}.[^\n]*$"):
        use(folder)


def test_a_verification_reads_every_shard_once(folder, monkeypatch):
    manifest, read = Manifest.read(folder), []
    real = token_files.sha256_of
    monkeypatch.setattr(token_files, "sha256_of", lambda path: read.append(path) or real(path))
    verify(manifest)
    assert sorted(read) == sorted(folder.glob("*/*.npy")) and len(read) == 10
    before = sorted(folder.rglob("*"))
    path = folder / manifest.shards["train"][3].tokens_file
    content = bytearray(path.read_bytes())
    content[150] ^= 128  # the low byte of a token, which becomes another one
    path.write_bytes(content)
    with pytest.raises(UserError, match="00003"):
        verify(manifest)
    assert sorted(folder.rglob("*")) == before

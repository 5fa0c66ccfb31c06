"""A damaged or unsuitable data folder is refused by name, at the start or when the damage is read."""

import json
import re
import shutil

import numpy as np
import pytest

from pc.data import Manifest, build_dataloader
from pc.data.inspection import verify
from pc.data.tokenizing import tokenize
from pc.errors import UserError


@pytest.fixture
def folder(shards, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(shards.folder, tmp_path / "data")


def build(folder, **kwargs):
    settings = dict(
        seq_len=16, local_batch_size=4, dp_rank=0, dp_world_size=1, seed=0, vocab_size=32000, infinite=False
    )
    return build_dataloader(folder, **settings | kwargs)


def test_untouched_folder_is_fine(folder):
    verify(Manifest.read(folder))
    assert len(list(build(folder))) > 0


def test_truncated_shard(folder, parquet_folder):
    path = folder / "train" / "00002.tokens.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    for look in (lambda: build(folder), lambda: verify(Manifest.read(folder))):
        with pytest.raises(UserError, match=re.escape(f"{path} has {len(whole) - 10} bytes instead of {len(whole)}")):
            look()
    tokenize(str(parquet_folder), folder, validation_fraction=0.2)  # the advice in the message
    assert path.read_bytes() == whole


def test_missing_shard(folder):
    (folder / "train" / "00001.tokens.npy").unlink()
    with pytest.raises(UserError, match="00001.tokens.npy is missing"):
        build(folder)


def test_flipped_bit(folder):
    path = folder / "train" / "00000.tokens.npy"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="00000.tokens.npy does not have the checksum"):
        verify(Manifest.read(folder))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_flip_that_makes_an_impossible_token_is_met_in_reading(folder, num_workers):
    path = folder / "train" / "00003.tokens.npy"
    tokens = np.load(path)
    tokens[10] |= 1 << 15
    np.save(path, tokens)
    with pytest.raises(UserError, match="^[^\n]*00003.tokens.npy holds token [^\n]*$"):  # one line, no traceback
        list(build(folder, num_workers=num_workers))


def test_damaged_header(folder):
    path = folder / "train" / "00000.tokens.npy"
    content = bytearray(path.read_bytes())
    content[:8] = b"garbage!"
    path.write_bytes(content)
    with pytest.raises(UserError, match="00000.tokens.npy is missing or damaged"):
        list(build(folder))


@pytest.mark.parametrize("change", ["order", "end", "type"])
def test_index_that_disagrees(folder, change):
    manifest_path, path = folder / "manifest.json", folder / "train" / "00000.offsets.npy"
    offsets = np.load(path)
    if change == "order":
        offsets[[3, 4]] = offsets[[4, 3]]
    elif change == "end":
        offsets[-1] -= 1
    np.save(path, offsets.astype(np.float64) if change == "type" else offsets)
    from pc.common.files import sha256_of

    content = json.loads(manifest_path.read_text())  # even if the checksum was updated
    shard = content["splits"]["train"]["shards"][0]
    shard["offsets_sha256"] = sha256_of(path)
    manifest_path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="00000.offsets.npy (does not fit|holds float64)"):
        verify(Manifest.read(folder))


def test_tokens_of_another_type_than_the_manifest_says(folder):
    path = folder / "train" / "00000.tokens.npy"
    tokens = np.load(path)
    np.save(path, tokens.view(np.int16))
    with pytest.raises(UserError, match="00000.tokens.npy holds int16"):
        list(build(folder))


def test_model_with_a_smaller_vocabulary(folder):
    with pytest.raises(UserError, match="'mistral-common' of 32000 entries, but the model's vocabulary has 16000"):
        build(folder, vocab_size=16000)


def test_sequence_longer_than_the_data(folder):
    with pytest.raises(UserError, match="too few for one sequence"):
        build(folder, seq_len=10**6)


def test_exchanged_tokenizer_file(folder, tmp_path):
    path = folder / "tokenizer" / "tokenizer.model"
    content = path.read_bytes()
    assert content.count(b"\xe2\x96\x81the") > 0
    path.write_bytes(content.replace(b"\xe2\x96\x81the", b"\xe2\x96\x81teh", 1))
    with pytest.raises(UserError, match="is not the one that made the shards"):
        Manifest.read(folder).load_tokenizer()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "does not exist"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not finished"),
        (
            lambda folder: [p.unlink() for p in (folder / "manifest.json", folder / "plan.json")],
            "not a folder of token",
        ),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 1'), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 1}'), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 9}'), "format 9"),
    ],
)
def test_folder_without_a_usable_manifest(make, message, folder):
    make(folder)
    with pytest.raises(UserError, match=message):
        build(folder)

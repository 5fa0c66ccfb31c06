"""Data are identified by content: other text, a replaced shard and a source that changes are noticed; paths do not count."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from helpers.format_1 import make_format_1
from helpers.small_tokenizers import make_tokenizer
from pc.errors import UserError
from pc_recipe.data import inspection, tokenizing
from pc_recipe.data.inspection import list_repeated
from pc_recipe.data.loader import GlobalOrderLoader
from pc_recipe.data.manifest import Manifest
from pc_recipe.data.tokenizing import tokenize

SETTINGS = dict(seq_len=8, local_batch_size=1, dp_rank=0, dp_world_size=1, vocab_size=300)
TEXTS = [f"document {i} of some words" for i in range(40)]


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Path:
    """A tokenizer of single bytes."""
    return make_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def make(letters, tmp_path):
    """make(texts, output, source="in"): a data folder of the texts, each in a file of its own."""

    def make(texts, output, source="in", **settings):
        source = tmp_path / source
        source.mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (source / f"{number:02}.txt").write_text(text)
        settings = {"validation_fraction": 0, "tokenizer": str(letters)} | settings
        return tokenize(str(source), tmp_path / output, **settings).folder

    return make


def resume(before, now) -> None:
    """Continue a run, which began on folder `before`, on folder `now`."""
    loader = GlobalOrderLoader(before, **SETTINGS)
    next(iter(loader))
    state = loader.state_dict()
    GlobalOrderLoader(now, **SETTINGS).load_state_dict(state)


def test_the_same_text_under_another_path_is_the_same(make):
    resume(make(TEXTS, "a"), make(TEXTS, "b", source="elsewhere"))


def test_other_text_of_the_same_names_and_sizes_is_refused(make):
    other = [text.replace("some", "SOME") for text in TEXTS]
    with pytest.raises(UserError, match=r"made with data.path \(its content\) = .*, this run has [^\n]*$"):
        resume(make(TEXTS, "a"), make(other, "b", source="elsewhere"))


def replace_shard(folder: Path, entry: str = "") -> None:
    """Put another shard of the same size and its checksum into the folder. entry: a key to remove from the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    path = folder / shard["tokens_file"]
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    shard["tokens_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.pop(entry, None)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_replaced_shard_with_its_checksum_is_refused(make, tmp_path):
    folder, before = make(TEXTS, "a"), make(TEXTS, "b")
    replace_shard(folder)
    with pytest.raises(UserError, match=r"damaged \(its shards are not those that it was written with\)"):
        Manifest.read(folder)
    shutil.copytree(before, tmp_path / "c")
    replace_shard(tmp_path / "c", "content_sha256")
    with pytest.raises(UserError, match="data.path"):
        resume(before, tmp_path / "c")


def test_a_folder_of_format_1_keeps_its_identity_and_gets_its_checksum_at_the_first_start(make, letters):
    files = {file.name: file.read_bytes() for file in letters.iterdir()}
    folder = make_format_1(make(TEXTS, "a"), files, "huggingface")
    before = json.loads((folder / "manifest.json").read_text())
    manifest = Manifest.read(folder)
    # what the checkpoints of an earlier run have
    state = {"data.path (its content)": before["configuration_sha256"], "split": "train", "training.seq_len": 8}
    loader = GlobalOrderLoader(folder, **SETTINGS)
    loader.load_state_dict({"position": 3, "identity": json.dumps(state | {"data.seed": 0})})
    assert loader.position == 3
    of_other_data = state | {"data.path (its content)": "0" * 64, "data.seed": 0}
    with pytest.raises(UserError, match=r"^the checkpoint was made with data.path \(its content\) = 0{64}, [^\n]*$"):
        loader.load_state_dict({"position": 3, "identity": json.dumps(of_other_data)})
    manifest.pin()
    assert Manifest.read(folder) == manifest
    assert json.loads((folder / "manifest.json").read_text()) == before | {"content_sha256": manifest.content_sha256}
    replace_shard(folder)
    with pytest.raises(UserError, match="its shards are not those"):
        Manifest.read(folder)


@pytest.mark.parametrize("moment", ["_encode", "record_unit"], ids=["while it is read", "between two commands"])
def test_a_source_that_changes_before_all_is_tokenised_is_refused(moment, make, letters, tmp_path, monkeypatch):
    file, real = tmp_path / "in" / "07.txt", getattr(tokenizing, moment)

    def change(*arguments):
        file.write_text(file.read_text().upper())  # of the same size
        os.utime(file, ns=(1, 1))
        if moment == "record_unit":
            raise KeyboardInterrupt
        return real(*arguments)

    again = dict(sources=str(tmp_path / "in"), output=tmp_path / "a", validation_fraction=0, tokenizer=str(letters))
    with monkeypatch.context() as meanwhile, pytest.raises((UserError, KeyboardInterrupt)):
        meanwhile.setattr(tokenizing, moment, change)
        make(TEXTS, "a")
    with pytest.raises(UserError, match="in/07.txt was changed after .*a was started; the shards would mix both"):
        tokenize(**again)
    shutil.rmtree(tmp_path / "a")
    manifest = tokenize(**again)
    os.utime(file, ns=(2, 2))
    assert tokenize(**again) == manifest  # finished data no longer need their input


def test_a_file_or_a_folder_is_not_taken_twice_under_two_names(make, tmp_path, letters):
    folder = make(TEXTS, "a")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    twice = [f"{tmp_path}/in", f"{tmp_path}/in/../in", f"{tmp_path}/link/07.txt"]
    manifest = tokenize(twice, tmp_path / "twice", validation_fraction=0, tokenizer=str(letters))
    assert manifest.content_sha256 == Manifest.read(folder).content_sha256
    with pytest.raises(UserError, match="data.path: .*twice and .*a are the same data; name one, with the sum"):
        GlobalOrderLoader({str(folder): 1, str(manifest.folder): 1}, **SETTINGS)


def test_validation_documents_that_are_training_documents_elsewhere_are_counted(make, monkeypatch):
    """Two folders divide the same text differently; each by itself repeats nothing."""
    small, large = (
        Manifest.read(make(TEXTS, name, validation_fraction=share)) for name, share in (("a", 0.1), ("b", 0.6))
    )
    splits = {name: tokenizing.split_by_hash(TEXTS, share) for name, share in (("a", 0.1), ("b", 0.6))}
    both = len({*splits["a"]["train"]} & {*splits["b"]["validation"]})
    assert both > 10 and not {*splits["b"]["train"]} & {*splits["a"]["validation"]}
    said = [
        f"{both} of {len(splits['b']['validation'])} validation documents of {large.folder} are training documents of "
    ]
    for training, expected in (([small], said), ([large], []), ([large, small], said)):
        lines = list_repeated(training, [small, large])
        assert len(lines) == len(expected) and all(map(str.startswith, lines, expected))
    monkeypatch.setattr(inspection, "LOOKED_AT", 3)
    assert list_repeated([small], [large])[0].startswith(("1 of 3 ", "2 of 3 ", "3 of 3 "))


def test_the_same_data_of_both_formats_are_the_same_data(make, letters):
    folder, older = make(TEXTS, "a"), make(TEXTS, "b")
    make_format_1(older, {file.name: file.read_bytes() for file in letters.iterdir()}, "huggingface")
    with pytest.raises(UserError, match="are the same data; name one"):
        GlobalOrderLoader({str(folder): 1, str(older): 1}, **SETTINGS)

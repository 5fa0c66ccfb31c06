"""Shards return the tokenizer's own ids for any documents."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pc.data import Manifest, load_tokenizer
from pc.data.inspection import read_documents
from pc.data.manifest import SPLITS
from pc.data.shards import smallest_dtype
from pc.data.tokenizing import split_by_hash, tokenize

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
spaces = st.text(" \t\n\r\u00a0\u3000", min_size=1, max_size=40)
control_texts = st.lists(st.sampled_from(["<s>", "</s>", "<unk>", " ", "x", "<0x00>"]), max_size=8).map("".join)
documents = st.lists(
    st.one_of(st.just(""), st.none(), any_text, spaces, control_texts, st.binary(max_size=40)),
    min_size=1,
    max_size=30,
)


def as_text(document: str | bytes | None) -> str:
    return document.decode("utf-8", "replace") if isinstance(document, bytes) else document or ""


def stored_documents(manifest: Manifest) -> dict[str, list[list[int]]]:
    return {
        split: [tokens.tolist() for tokens in read_documents(manifest, split, manifest.documents(split))]
        for split in SPLITS
    }


def expected_documents(documents: list, fraction: float, tokenizer) -> dict[str, list[list[int]]]:
    divided = split_by_hash([d if isinstance(d, bytes) else (d or "").encode() for d in documents], fraction)
    return {
        split: [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
        for split, texts in divided.items()
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents=documents)
def test_odd_documents_come_back(documents, tmp_path_factory, write_parquet):
    folder = tmp_path_factory.mktemp("round-trip")
    tokenizer = load_tokenizer("mistral-common")
    manifest = tokenize(str(write_parquet(folder / "in.parquet", documents)), folder / "out", validation_fraction=0.3)
    stored = stored_documents(manifest)
    assert stored == expected_documents(documents, 0.3, tokenizer)
    texts = sorted(tokenizer.decode(tokens[1:-1]) for split in SPLITS for tokens in stored[split])
    assert texts == sorted(tokenizer.decode(tokenizer.encode(as_text(document))) for document in documents)
    assert all(tokens.count(1) == tokens.count(2) == 1 for split in SPLITS for tokens in stored[split])


def test_ten_megabytes_in_one_document(tmp_path, write_parquet):
    text = "The spectrum of a weight, 3.14 times. \n" * 256_000
    assert len(text) > 9_900_000
    source = write_parquet(tmp_path / "in.parquet", ["before", text, "after"])
    manifest = tokenize(str(source), tmp_path / "out", validation_fraction=0)
    before, long, after = stored_documents(manifest)["train"]
    tokenizer = load_tokenizer("mistral-common")
    assert tokenizer.decode(long[1:-1]) == text
    assert tokenizer.decode(before[1:-1]) == "before" and tokenizer.decode(after[1:-1]) == "after"


def test_files_are_plain_numpy(shards):
    shard = shards.shards["train"][0]
    tokens, offsets = (np.load(shards.folder / name) for name in (shard.tokens_file, shard.offsets_file))
    assert tokens.dtype == np.uint16 and offsets.dtype == np.int64
    assert set(tokens[offsets[:-1]].tolist()) == {1} and set(tokens[offsets[1:] - 1].tolist()) == {2}


@pytest.mark.parametrize(("size", "dtype"), [(32000, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_wider_numbers_only_when_needed(size, dtype):
    assert smallest_dtype(size) == dtype


def test_split_follows_the_text_alone():
    texts = [f"document {i}".encode() for i in range(4000)]
    divided = split_by_hash(texts, 0.1)
    # 4000 draws at 0.1: standard deviation 19; five of them.
    assert abs(len(divided["validation"]) - 400) < 95
    again = split_by_hash(texts[::-1] + texts[:7], 0.1)
    assert set(again["validation"]) == set(divided["validation"])
    assert not set(again["train"]) & set(again["validation"])
    assert set(split_by_hash(texts, 0.05)["validation"]) < set(divided["validation"])
    assert split_by_hash(texts, 0)["validation"] == []

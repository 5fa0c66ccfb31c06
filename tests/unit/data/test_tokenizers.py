"""Each kind of tokenizer: the library's own ids, no control ids from text, clear errors; and a newly trained one."""

import json

import numpy as np
import pytest

from pc.errors import UserError
from pc_recipe.data.tokenizers import load_tokenizer
from pc_recipe.data.train_tokenizer import train_tokenizer

TEXTS = ["The weight ground corn past the mill. " * 20, "Größe, naïve, 東京", None]
ODD_TEXTS = [
    "", " ", "   \n\t ", "\x00", "\ufffd", " ▁ x", "é e\u0301", "\u3000", "👨‍👩‍👧", "<s>", "a</s>b", "<s> x </s><unk>",
    "<|endoftext|>", "<0x41>",
]  # fmt: skip


@pytest.fixture(scope="session")
def source(tmp_path_factory, write_parquet):
    return str(write_parquet(tmp_path_factory.mktemp("text") / "text.parquet", TEXTS))


@pytest.fixture(scope="session")
def hugging_face_folder(source, tmp_path_factory):
    """A byte-level BPE of 300 entries with <s> and </s>."""
    folder = tmp_path_factory.mktemp("hf")
    assert train_tokenizer(source, folder, 300, 1) == 300
    return folder


def test_no_text_and_a_file_in_the_way_are_said(source, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="empty.txt: there is no text in it"):
        train_tokenizer(str(tmp_path / "empty.txt"), tmp_path / "made", 300, 1)
    with pytest.raises(UserError, match="could not write .*empty.txt/token"):
        train_tokenizer(source, tmp_path / "empty.txt", 300, 1)


@pytest.fixture(params=["mistral-common", "huggingface", "tiktoken"])
def tokenizer(request, hugging_face_folder, tiny_encoding):
    return load_tokenizer(
        {"huggingface": hugging_face_folder, "tiktoken": tiny_encoding}.get(request.param, request.param)
    )


def test_odd_texts_never_give_control_ids_and_come_back(tokenizer):
    control = {tokenizer.bos_id, tokenizer.eos_id}
    for text, ids in zip(ODD_TEXTS, tokenizer.encode_batch(ODD_TEXTS), strict=True):
        assert not control & set(ids)
        # SentencePiece represents a space as "▁", so it cannot distinguish the two.
        assert tokenizer.decode(ids) == (text.replace("▁", " ") if tokenizer.kind == "sentencepiece" else text)


def test_documents_get_bos_and_eos(tokenizer):
    texts = ["the weight", "", "x"]
    tokens = tokenizer.documents(texts)
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    expected = [[*lead, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == sum(expected, [])


@pytest.mark.parametrize("bos", [None, "</s>"], ids=["none", "the EOS, as GPT-2's"])
def test_without_a_bos_of_its_own(hugging_face_folder, tmp_path, bos):
    config = json.loads((hugging_face_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((hugging_face_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": bos}))
    with_bos, without = load_tokenizer(hugging_face_folder), load_tokenizer(tmp_path)
    assert with_bos.sha256 != without.sha256 and without.bos_id is None
    assert without.documents(["x"]).tolist() == [*without.encode("x"), without.eos_id]


@pytest.mark.parametrize("reference", ["no/such/folder", "gpt3", "broken.model", "."])
def test_bad_references_are_explained(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=f"^tokenizer '{reference}': neither .* nor a SentencePiece model"):
        load_tokenizer(reference)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "tokenizer_config.json"),
        ('{"eos_token": "<end>"}', "names '<end>', which tokenizer.json does not have"),
        ("{}", "no end-of-text token"),
    ],
)
def test_folder_without_bos_and_eos_settings_is_refused(hugging_face_folder, tmp_path, settings, message):
    (tmp_path / "tokenizer.json").write_bytes((hugging_face_folder / "tokenizer.json").read_bytes())
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)

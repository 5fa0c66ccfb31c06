"""Each kind of tokenizer: the library's own ids, no control ids from text, clear errors."""

import json
import random

import numpy as np
import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pc.data import load_tokenizer
from pc.data.encoding import Encoder, _gigatoken
from pc.errors import UserError

ODD_TEXTS = [
    "",
    "a",
    " ",
    "   \n\t ",
    "\x00",
    "a\x00b",
    "\ufffd",
    "▁",
    " ▁ x",
    "é e\u0301",
    "\u3000",
    "字" * 50,
    "👨‍👩‍👧",
    "<s>",
    "</s>",
    "a</s>b",
    "<s> x </s><unk>",
    "<|endoftext|>",
    "<0x41>",
    "[INST] x [/INST]",
]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
pieces = st.sampled_from(["<s>", "</s>", "<unk>", "<0x0A>", "<|endoftext|>", " ", "  ", "▁", "a", "\n", "\x00", "é"])
odd_text = st.one_of(any_text, st.lists(pieces, max_size=12).map("".join))


@pytest.fixture(scope="session")
def hugging_face_folder(tmp_path_factory):
    """A byte-level BPE of 400 entries with <s> and </s>, trained here."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(["the spectrum of the weight is the weight of the spectrum"] * 20, trainer)
    folder = tmp_path_factory.mktemp("hf")
    model.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiktoken_encoding():
    """A tiktoken encoding of single bytes; the named ones need the network."""
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    return tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})


@pytest.fixture(params=["mistral-common", "huggingface", "tiktoken"])
def tokenizer(request, hugging_face_folder, tiktoken_encoding, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", {"bytes": tiktoken_encoding}.__getitem__)
    return load_tokenizer({"huggingface": hugging_face_folder, "tiktoken": "bytes"}.get(request.param, request.param))


def test_odd_texts_never_give_control_ids_and_come_back(tokenizer):
    control = {tokenizer.bos_id, tokenizer.eos_id}
    ids, lengths = tokenizer.encode_batch(ODD_TEXTS)
    assert len(lengths) == len(ODD_TEXTS) and lengths.sum() == len(ids)
    assert not control & set(ids.tolist())
    for text in ODD_TEXTS:
        # SentencePiece represents a space as "▁", so it cannot distinguish the two.
        expected = text.replace("▁", " ") if tokenizer.kind == "sentencepiece" else text
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_the_library_alone_would_read_control_tokens(hugging_face_folder):
    # The control for the test above: without our setting, "</s>" in a text is the end of the document.
    plain = tokenizers.Tokenizer.from_file(str(hugging_face_folder / "tokenizer.json"))
    assert plain.token_to_id("</s>") in plain.encode("a</s>b").ids


def test_default_is_the_open_32000_entry_tokenizer():
    tokenizer = load_tokenizer("mistral-common")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (32000, 1, 2)


def test_hash_tells_tokenizers_apart(hugging_face_folder, tmp_path):
    config = json.loads((hugging_face_folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((hugging_face_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
    with_bos, without = load_tokenizer(hugging_face_folder), load_tokenizer(tmp_path)
    assert with_bos.sha256 != without.sha256 and without.bos_id is None
    assert load_tokenizer(hugging_face_folder).sha256 == with_bos.sha256


def test_documents_get_bos_and_eos(tokenizer):
    texts = ["the weight", "", "x"]
    tokens, lengths = Encoder(tokenizer).documents(texts, "uint16")
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    expected = [lead + tokenizer.encode(text) + [tokenizer.eos_id] for text in texts]
    assert tokens.dtype == np.uint16
    assert lengths.tolist() == [len(one) for one in expected]
    assert tokens.tolist() == sum(expected, [])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no/such/folder", "does not exist"),
        ("no-such-encoding", "neither a folder"),
        ("broken.model", "not a SentencePiece model"),
        (".", "neither tokenizer.json nor tokenizer.model"),
    ],
)
def test_bad_references_are_explained(reference, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=message):
        load_tokenizer(reference)


def test_folder_without_bos_and_eos_settings_is_refused(hugging_face_folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((hugging_face_folder / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="tokenizer_config.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(UserError, match="<end>"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no end-of-text token"):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def encoders():
    """gigatoken and SentencePiece itself, for the same model."""
    pytest.importorskip("gigatoken")
    tokenizer = load_tokenizer("mistral-common")
    fast, slow = Encoder(tokenizer), Encoder(tokenizer, fast=False)
    assert (fast.engine, slow.engine) == ("gigatoken", "sentencepiece")
    return fast, slow


class TestFastEngine:
    """gigatoken, if installed, gives SentencePiece's ids."""

    @settings(max_examples=300, deadline=None)
    @given(texts=st.lists(odd_text, min_size=1, max_size=5))
    def test_ids_are_equal(self, encoders, texts):
        (fast, fast_lengths), (slow, slow_lengths) = (encoder.documents(texts, "uint16") for encoder in encoders)
        assert fast.tolist() == slow.tolist() and fast_lengths.tolist() == slow_lengths.tolist()

    def test_as_it_comes_it_reads_control_tokens(self, encoders):
        import gigatoken

        tokenizer = encoders[0].tokenizer
        plain = gigatoken.Tokenizer.from_sentencepiece(tokenizer.files["tokenizer.model"])
        assert tokenizer.eos_id in list(plain.encode("a</s>b"))

    def test_a_difference_stops_the_run(self, encoders):
        tokenizer = encoders[0].tokenizer
        encoder = Encoder(tokenizer)

        class Wrong:
            def encode_batch(self, texts, parallel):
                return _gigatoken(tokenizer).encode_batch([text + "!" for text in texts], parallel=parallel)

        encoder._fast = Wrong()
        with pytest.raises(RuntimeError, match="disagree"):
            encoder.documents(["the weight"], "uint16")

    def test_one_document_in_two_hundred_is_checked(self, encoders, monkeypatch):
        encoder = Encoder(encoders[0].tokenizer)
        checked = []
        real = encoder.tokenizer.encode
        monkeypatch.setattr(encoder.tokenizer, "encode", lambda text: checked.append(text) or real(text))
        texts = [str(random.Random(i).random()) for i in range(1000)]
        for start in range(0, 1000, 130):
            encoder.documents(texts[start : start + 130], "uint16")
        assert checked == texts[::200]

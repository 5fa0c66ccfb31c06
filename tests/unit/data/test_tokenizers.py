"""A newly trained tokenizer, and errors for what is not a tokenizer. `test_tokenizer_formats` tests the ids of each kind."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers.small_tokenizers import make_sentencepiece, make_tokenizer
from pc.errors import UserError
from pc_recipe.data.tokenizers import load_tokenizer
from pc_recipe.data.train_tokenizer import train_tokenizer

TEXTS = ["The weight ground corn past the mill. " * 20, "Größe, naïve, 東京", None]


@pytest.fixture(scope="session")
def source(tmp_path_factory, write_parquet):
    return str(write_parquet(tmp_path_factory.mktemp("text") / "text.parquet", TEXTS))


@pytest.fixture(scope="session")
def hugging_face_folder(source, tmp_path_factory):
    """A byte-level BPE of 300 entries with <s> and </s>."""
    folder = tmp_path_factory.mktemp("hf")
    assert train_tokenizer([source], folder, 300, 1) == 300
    return folder


def test_no_text_and_a_file_in_the_way_are_reported(source, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match="empty.txt: there is no text in it"):
        train_tokenizer([str(tmp_path / "empty.txt")], tmp_path / "made", 300, 1)
    with pytest.raises(UserError, match="could not write .*empty.txt/token"):
        train_tokenizer([source], tmp_path / "empty.txt", 300, 1)


@pytest.mark.parametrize(("megabytes", "is_read"), [(1, False), (2, True)])
def test_a_tokenizer_is_trained_on_the_first_megabytes(megabytes, is_read, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("ab " * 333_334, "yz " * 9))
    )
    train_tokenizer([str(tmp_path / "a.jsonl")], tmp_path / "made", 300, megabytes)
    assert ("yz" in json.loads((tmp_path / "made" / "tokenizer.json").read_text())["model"]["vocab"]) == is_read


@pytest.mark.parametrize("kind", ["mistral-common", "trained", "SentencePiece", "SentencePiece without a first space"])
def test_bytes_of_tokens_add_up_to_the_text(kind, hugging_face_folder, tmp_path):
    """Of documents, with the space that SentencePiece puts before each, entries of single bytes, and words for entries."""
    reference: str | Path = {"mistral-common": kind, "trained": hugging_face_folder}.get(kind, tmp_path / "made.model")
    if reference == tmp_path / "made.model":
        make_sentencepiece(tmp_path / "made.model", add_dummy_prefix=kind == "SentencePiece")
    tokenizer = load_tokenizer(reference)
    texts = ["The weight ground corn.\n", "Größe, naïve, 東京 🦙", "</s> <0x0A> a  b", " x"]
    tokens = tokenizer.documents(texts)
    assert tokenizer.text_bytes is not None
    assert tokenizer.text_bytes[tokens].sum() == len("".join(texts).encode())


def test_bytes_of_tokens_are_unknown_where_no_decoder_makes_a_text_of_them(tmp_path):
    assert load_tokenizer(make_tokenizer(tmp_path / "bytes")).text_bytes is not None
    content = json.loads((tmp_path / "bytes" / "tokenizer.json").read_text())
    without = {key: value for key, value in content.items() if key != "decoder"}
    for state in (content | {"decoder": None}, without):
        (tmp_path / "bytes" / "tokenizer.json").write_text(json.dumps(state))
        assert load_tokenizer(tmp_path / "bytes").text_bytes is None


@pytest.mark.parametrize("unk", ["<unk>", None])
def test_bytes_of_tokens_are_unknown_where_some_text_has_no_tokens_of_its_own(tmp_path, unk):
    """It becomes <unk>, whose letters are not the text's, or nothing."""
    letters = {entry: i for i, entry in enumerate(["<unk>", "<s>", "</s>", "▁", *"abcd"])}
    single = [f"<0x{byte:02X}>" for byte in range(256)]

    def bytes_of(vocabulary, text="a  b\n\nc", **settings):
        model = Tokenizer(models.BPE(vocabulary, [], unk_token=unk, **settings))
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
        model.add_special_tokens(["<unk>", "<s>", "</s>"])
        model.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(MADE))
        tokenizer = load_tokenizer(tmp_path)
        return None if tokenizer.text_bytes is None else tokenizer.text_bytes[tokenizer.documents([text])].sum()

    assert bytes_of(letters) is None
    whole = letters | {entry: len(letters) + i for i, entry in enumerate(single)}
    assert bytes_of(whole) is None and bytes_of(whole, byte_fallback=True) == 7
    assert bytes_of({entry: i for i, entry in enumerate([*letters, *single[:-1]])}, byte_fallback=True) is None
    make_tokenizer(tmp_path / "bytes", without="Ċ")  # a line's end
    assert load_tokenizer(tmp_path / "bytes").text_bytes is None


NONE, MADE = "neither .* nor a SentencePiece model", {"bos_token": "<s>", "eos_token": "</s>"}
MISTAKES = {
    "no/such/folder": ({}, NONE),
    "broken.model": ({"broken.model": "not a model"}, NONE),
    ".": ({}, NONE),
    "no settings": ({"tokenizer.json": None}, "no end-of-text token .*: tokenizer_config.json names no eos_token"),
    "other names": (
        {"tokenizer.json": None, "tokenizer_config.json": {"eos_token": "<end>"}},
        "names '<end>', which tokenizer.json does not have",
    ),
    "no names": ({"tokenizer.json": None, "tokenizer_config.json": {}}, "no end-of-text token"),
} | {
    f"tokenizer.json is {content:.20}": ({"tokenizer.json": content, "tokenizer_config.json": MADE}, "")
    for content in ("", "[]", "null", "[" * 10_000, '{"version": "1.0"}', '{"model": {"type": "BPE"}}')
}


@pytest.mark.parametrize("what", MISTAKES)
def test_what_is_not_a_tokenizer_is_refused_in_one_line(what, hugging_face_folder, tmp_path, monkeypatch):
    """MISTAKES: {what is given: (its files, where None stands for a whole file; the message)}"""
    monkeypatch.chdir(tmp_path)
    files, sentence = MISTAKES[what]
    for name, content in files.items():
        whole = (hugging_face_folder / name).read_text() if content is None else content
        Path(name).write_text(whole if isinstance(whole, str) else json.dumps(whole))
    reference = "." if "tokenizer.json" in files else what
    with pytest.raises(UserError, match=f"^tokenizer '{reference}': .*{sentence}") as raised:
        load_tokenizer(reference)
    assert "\n" not in str(raised.value)

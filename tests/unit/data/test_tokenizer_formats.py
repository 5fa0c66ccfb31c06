"""Every kind of tokenizer gives the same ids in its own library, in the shards and in transformers.

Each is compared with the library that its file is made for, which the project does not use to encode.
"""

import hashlib
import io
import json
import random
import shutil
import zipfile
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as public
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import sentencepiece_model_pb2
from tiktoken.load import load_tiktoken_bpe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from helpers.format_1 import make_format_1
from pc.errors import UserError
from pc_recipe.data import tokenizer_formats
from pc_recipe.data.inspection import read_documents
from pc_recipe.data.manifest import Manifest, require_same_tokenizer
from pc_recipe.data.tokenizers import _mistral_model, load_tokenizer
from pc_recipe.data.tokenizing import tokenize
from pc_recipe.data.wheel import download_wheel

DOCS = Path(__file__).resolve().parents[3] / "docs"
REAL = [text for file in sorted(DOCS.glob("*.md"))[:6] for text in file.read_text().split("\n\n") if text]
ODD = [
    " ", "  two in front", "a  b   c    d     e", "line\n\nline\ttab\r\n \n", "trailing   ", "\x00", "\ufffd",
    "naïve café, Ωμέγα, Привет, 漢字漢字, שלום, 🙂👩‍👩‍👧", "ﬁ ½ Ａ \u00a0 \u200b \u3000 e\u0301 ſ", "3.14159 + 2_000 = x**2; 1234567",
    "it's I'LL they'Ve 's", " " * 1000 + "x" + "\n" * 300, "aaaaaaaaaaaaaaaaaaaa" * 20, "<0x41> [INST]x[/INST] ▁x",
]  # fmt: skip
SPELLED = "A</s><s>, <|endoftext|> x<unk> [SEP][CLS] <bos><eos> <|begin_of_text|><|end_of_text|>."
TEXTS = [*ODD, SPELLED, *REAL]


def came_through(reference, folder: Path, original, *, texts=TEXTS, decodes=True, adds_bos=True) -> Manifest:
    """Tokenise, compare the ids with `original(text)` and with transformers', and the decoded shards with the text."""
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = tokenize(str(folder / "in.jsonl"), folder / "out", tokenizer=str(reference), validation_fraction=0)
    tokenizer = manifest.load_tokenizer()
    tokenizer.save(folder / "export", 64)
    theirs = AutoTokenizer.from_pretrained(folder / "export", split_special_tokens=True)
    lead = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    stored = [tokens.tolist() for tokens in read_documents(manifest, "train")]
    assert len(stored) == len(texts) and bool(lead) == adds_bos
    for text, ids in zip(texts, stored, strict=True):
        assert ids == [*lead, *original(text), tokenizer.eos_id], text
        assert theirs.encode(text) == ids[:-1] and theirs.eos_token_id == tokenizer.eos_id
        if decodes:
            expected = text.replace("▁", " ") if decodes == "spaces" else text  # they write a space as ▁
            assert tokenizer.decode(ids[len(lead) : -1]) == expected
    # a stored tokenizer is not converted again, so its checksum stays
    again = load_tokenizer(folder / "export")
    assert again.sha256 == tokenizer.sha256 == manifest.tokenizer.sha256
    assert (folder / "export" / "tokenizer.json").read_bytes() == (folder / "out/tokenizer/tokenizer.json").read_bytes()
    return manifest


# --- SentencePiece ----------------------------------------------------------------------------------


def train(**options) -> bytes:
    made, size = io.BytesIO(), options.pop("vocab_size", 700)
    like_llama = dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    sentences = iter([line for text in REAL for line in text.split("\n") if line] + ["a   b     c        d"] * 200)
    options = like_llama | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=made, vocab_size=size, **options)
    return made.getvalue()


MODELS = {
    "as Llama 2": dict(split_digits=True),
    "no space in front": dict(add_dummy_prefix=False),
    "runs of spaces": dict(allow_whitespace_only_pieces=True),
    "pieces over words": dict(split_by_whitespace=False),
    "pieces over everything": dict(split_by_whitespace=False, split_by_unicode_script=False, split_by_number=False),
    "without BOS": dict(bos_id=-1),
    "other names": dict(bos_piece="<start>", eos_piece="<end>", unk_piece="<other>"),
    "other ids": dict(eos_id=0, bos_id=1, unk_id=2),
    "controls": dict(control_symbols="[INST],[/INST]"),
    "padding": dict(pad_id=3),
    "few characters": dict(character_coverage=0.98, vocab_size=400),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model_comes_through(name, tmp_path):
    (tmp_path / "mine.model").write_bytes(train(**MODELS[name]))
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "mine.model"))
    bos = "bos_id" not in MODELS[name] or MODELS[name]["bos_id"] >= 0
    came_through(tmp_path / "mine.model", tmp_path / name, original.encode, decodes="spaces", adds_bos=bos)


REFUSED = {
    "is not of type BPE": dict(model_type="unigram"),
    r"is not of type BPE.*": dict(model_type="char"),
    r"normalises text \(nmt_nfkc\)": dict(normalization_rule_name="nmt_nfkc"),
    r"normalises text \(nfkc_cf\)": dict(normalization_rule_name="nfkc_cf"),
    "removes spaces": dict(remove_extra_whitespaces=True),
    "marks them behind words": dict(treat_whitespace_as_suffix=True),
    "has no byte fallback": dict(byte_fallback=False),
    "user-defined or unused symbols: <mask>": dict(user_defined_symbols="<mask>"),
    "no end-of-text token": dict(eos_id=-1),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_sentencepiece_model_that_says_what_tokenizer_json_cannot_is_refused(why, tmp_path):
    (tmp_path / "mine.model").write_bytes(train(**REFUSED[why]))
    with pytest.raises(UserError, match=f"^tokenizer '.*mine.model': it .*{why}[^\n]*$"):
        tokenize(str(DOCS / "own-text.md"), tmp_path / "out", tokenizer=str(tmp_path / "mine.model"))
    assert not (tmp_path / "out").exists()


def extended(*words: str, score: float = 0.0) -> bytes:
    """The default model with entries appended, as scripts do that add a language to Llama."""
    model = sentencepiece_model_pb2.ModelProto.FromString(_mistral_model().read_bytes())
    for place, word in enumerate(words):
        model.pieces.add(piece=word, score=score * place, type=1)
    return model.SerializeToString()


OVERLAPPING = "大学 学生 生活 活动 据说 说明 明天 天空 世界 界面 面对 对象".split()


def test_appended_entries_of_one_score_are_refused(tmp_path):
    """Of 大学 and 学生, SentencePiece makes the one further left; a list of merges always the same one."""
    file = tmp_path / "mine.model"
    file.write_bytes(extended(*OVERLAPPING))
    with pytest.raises(
        UserError, match="its entries '.*' and '.*' have the same score, .*: give each entry a score of"
    ):
        load_tokenizer(file)
    # with scores of their own they come through, in texts made of overlapping entries
    file.write_bytes(extended(*OVERLAPPING, score=0.5))
    original = sentencepiece.SentencePieceProcessor(model_file=str(file))
    draw = random.Random(0)
    texts = ["".join(draw.choices("".join(OVERLAPPING), k=12)) for _ in range(200)]
    assert sum(any(original.id_to_piece(i) in OVERLAPPING for i in original.encode(text)) for text in texts) > 100
    assert load_tokenizer(file).encode_batch(texts) == original.encode(texts)


@pytest.fixture(scope="module")
def default():
    original = sentencepiece.SentencePieceProcessor(str(_mistral_model()))
    return load_tokenizer("mistral-common").encode, original.encode


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("ab .\n\t<s>/▁é漢🙂\u200b0\r"), max_size=40) | st.text(max_size=40))
def test_the_default_gives_the_ids_of_its_own_library(default, text):
    text = text.encode(errors="ignore").decode()  # without lone surrogates, which are not text
    assert default[0](text) == default[1](text)


# --- tiktoken ---------------------------------------------------------------------------------------


def byte_level(size: int, special=()) -> Tokenizer:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model.train_from_iterator(
        REAL, trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet)
    )
    return model


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """700 entries, bytes first; the vocabularies of tiktoken need the network."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(b): b for b in kept} | {
        chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in kept)
    }
    ids = byte_level(700).get_vocab()
    return {bytes(byte_of[letter] for letter in name): ids[name] for name in sorted(ids, key=ids.get)}


@pytest.fixture
def encoding(request, ranks, monkeypatch):
    """A tiktoken encoding with its own pattern and special entries, but a small vocabulary."""
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(public, loader, lambda *_, **__: ranks)
    described = public.ENCODING_CONSTRUCTORS[request.param]()
    described.pop("explicit_n_vocab", None)
    first = min(described["special_tokens"].values())
    # p50k_base has entries, runs of spaces, whose ids follow its special one
    described["mergeable_ranks"] = ranks | {b" " * n: first + n for n in range(2, 9) if "p50k_base" in request.param}
    made = tiktoken.Encoding(**described)
    monkeypatch.setattr(tiktoken, "get_encoding", {request.param: made}.__getitem__)
    return SimpleNamespace(name=request.param, made=made)


@pytest.mark.parametrize("encoding", public.ENCODING_CONSTRUCTORS, indirect=True)
def test_tiktokens_encodings_come_through(encoding, tmp_path):
    manifest = came_through(encoding.name, tmp_path, encoding.made.encode_ordinary, adds_bos=False)
    tokenizer = manifest.load_tokenizer()
    assert tokenizer.eos_id == encoding.made.eot_token and tokenizer.vocab_size == encoding.made.n_vocab
    theirs, special = AutoTokenizer.from_pretrained(tmp_path / "export"), encoding.made._special_tokens
    ids = {theirs.convert_tokens_to_ids(name): name for name in special}
    assert ids.keys() - {None} == set(special.values()) and theirs.eos_token == "<|endoftext|>"


CACHED = {  # tiktoken names the files in its cache by the SHA-1 of their address
    "r50k_base": "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4", "p50k_base": "ec7223a39ce59f226a68acc30dc1af2788490e15",
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """The vocabularies of tiktoken's encodings, which a package ships, and a tokenizer.json."""
    folder = tmp_path_factory.mktemp("published")
    sha256 = "e8284f5cc74ae1aed77516cdfbb2db3746d50c4ba055fb21358e6e25aea25a15"
    with zipfile.ZipFile(download_wheel("litellm==1.60.0", sha256, folder)) as archive:
        for name in archive.namelist():
            if name.startswith("litellm/litellm_core_utils/tokenizers/"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    # p50k_base is r50k_base plus runs of spaces; tiktoken verifies the checksum
    lines = (folder / CACHED["p50k_base"]).read_bytes().splitlines(keepends=True)
    (folder / CACHED["r50k_base"]).write_bytes(b"".join(lines[:50_256]))
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in public.ENCODING_CONSTRUCTORS if name != "gpt2"])
def test_tiktokens_encodings_come_through_with_their_own_vocabularies(name, published, tmp_path, monkeypatch):
    """All but gpt2's, whose files no known package ships; it has the same entries as r50k_base."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(published))
    original = tiktoken.get_encoding(name)
    tokenizer = came_through(name, tmp_path, original.encode_ordinary, adds_bos=False).load_tokenizer()
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (original.eot_token, original.n_vocab)


def test_an_encoding_is_not_read_from_a_shared_folder(tmp_path, monkeypatch):
    """tiktoken's default is the temporary folder that all users share; there it replaces files of another checksum."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "common"))
    (tmp_path / "common" / "data-gym-cache").mkdir(parents=True)
    others = [tmp_path / "common" / "data-gym-cache" / place for place in CACHED.values()]
    for file in others:
        file.write_text("another user's")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DATA_GYM_CACHE_DIR", raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # so that monkeypatch restores it when the test ends
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.setattr("tiktoken.load.read_file", Mock(side_effect=OSError("no network")))
    with pytest.raises(UserError, match="no network"):
        load_tokenizer("p50k_edit")
    assert [file.read_text() for file in others] == ["another user's"] * 2


@pytest.mark.soak
def test_a_published_tokenizer_json_comes_through(published, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((published / "anthropic_tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<EOT>"}')
    original = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    came_through(tmp_path, tmp_path / "made", lambda text: original.encode(text).ids, decodes=False, adds_bos=False)


def write_tekken(path: Path, ranks: dict[bytes, int], special: int = 24) -> Path:
    """As Mistral writes one of version 3, whose names of special entries are in its package."""
    entries = [*(bytes([byte]) for byte in range(256)), *(entry for entry in ranks if len(entry) > 1)]
    vocab = [
        {"rank": rank, "token_bytes": b64encode(entry).decode(), "token_str": entry.decode(errors="replace")}
        for rank, entry in enumerate(entries)
    ]
    config = {"pattern": LLAMA3, "num_vocab_tokens": len(ranks), "default_num_special_tokens": special, "version": "v3"}
    path.write_text(json.dumps({"config": config | {"default_vocab_size": len(ranks) + special - 5}, "vocab": vocab}))
    return path


@pytest.mark.parametrize("named", [True, False], ids=["the file", "its folder"])
def test_a_tekken_json_comes_through(named, tmp_path, ranks):
    """With as many entries as its vocabulary size says, behind the special ones."""
    file = write_tekken(tmp_path / "tekken.json", ranks)
    original = Tekkenizer.from_file(file)
    manifest = came_through(
        file if named else tmp_path, tmp_path / "made", lambda text: original.encode(text, bos=False, eos=False)
    )
    tokenizer = manifest.load_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (original.n_words, 1, 2) == (719, 1, 2)


def test_a_tekken_json_that_its_library_does_not_read_is_refused(tmp_path, ranks):
    for lost in ("config", "vocab"):
        file = write_tekken(tmp_path / "tekken.json", ranks)
        file.write_text(json.dumps(json.loads(file.read_text()) | {lost: {}}))
        with pytest.raises(UserError, match="tekken.json is no tekken.json that mistral_common reads [^\n]*$"):
            load_tokenizer(file)


def test_llama_3s_list_of_ranks_comes_through(tmp_path, monkeypatch, ranks):
    content = b"".join(b64encode(entry) + f" {rank}\n".encode() for entry, rank in ranks.items())
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(
        UserError, match="it lists tiktoken's ranks, without pattern and special entries; give the folder"
    ):
        load_tokenizer(tmp_path)  # another model's, for all that is known
    monkeypatch.setattr(tokenizer_formats, "LLAMA3_SHA256", hashlib.sha256(content).hexdigest())
    original = tiktoken.Encoding("mine", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    tokenizer = came_through(tmp_path, tmp_path / "made", original.encode_ordinary).load_tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (700, 701, 956)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_mistrals_own_tekken_comes_through(name, tmp_path):
    original = Tekkenizer.from_file(_mistral_model().parent / name)
    came_through(original.file_path, tmp_path, lambda text: original.encode(text, bos=False, eos=False))


@pytest.mark.soak
def test_llama_3s_own_list_of_ranks_comes_through(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # no copy of it
    sha256 = "7f77f78ff13fca09f70d76a376aff6414cd901623fb9d57e69c2f8367a73032f"
    with zipfile.ZipFile(download_wheel("llama-models==0.3.0", sha256, tmp_path)) as archive:
        (tmp_path / "tokenizer.model").write_bytes(archive.read("llama_models/llama3/tokenizer.model"))
    original = tiktoken.Encoding(
        "llama3",
        pat_str=LLAMA3,
        mergeable_ranks=load_tiktoken_bpe(str(tmp_path / "tokenizer.model")),
        special_tokens={},
    )
    tokenizer = came_through(tmp_path, tmp_path / "made", original.encode_ordinary).load_tokenizer()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (128_000, 128_001, 128_256)


def test_patterns_with_line_ends_and_possessive_repeats_come_through(tmp_path, monkeypatch, ranks):
    """In the regular expressions of tokenizer.json, unlike tiktoken's, "$" matches at any line end and "{1,3}+" repeats."""
    pattern = r"\p{N}{1,3}+|[a-z]{2,3}+(?!x)|\s++$|\s+(?!\S)|.|\n"
    special = {"<|endoftext|>": 700, "<|x|>": 900}
    made = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": made}.__getitem__)
    texts = ["1234567 12", "abcx abc", "x  \n  y  ", " \n \n"]
    came_through("gpt2", tmp_path, made.encode_ordinary, texts=texts, adds_bos=False)


def test_a_conversion_that_gives_other_ids_is_refused(tmp_path, monkeypatch, ranks):
    def load(pattern, **more):
        special = {"<|endoftext|>": 700} | more
        made = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": made}.__getitem__)
        (tmp_path / "in.txt").write_text("Größe")
        return tokenize(str(tmp_path / "in.txt"), tmp_path / "out", tokenizer="gpt2")

    with pytest.raises(UserError, match="^tokenizer 'gpt2': as tokenizer.json it would encode .* differently$"):
        load(r"[a-z]+|\s")  # drops everything else
    with pytest.raises(UserError, match="^tokenizer 'gpt2': "):
        load(r"\S+|\s", th=ranks[b"th"] - 1)  # two entries of one id
    monkeypatch.setattr("pc_recipe.data.tokenizer_formats.combine", lambda entries: iter(()))
    with pytest.raises(UserError, match="would encode 'Größe' differently"):  # found in the user's own first texts
        load(r"[a-z]+|\s")
    assert not (tmp_path / "out").exists()


# --- tokenizer.json ---------------------------------------------------------------------------------

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHINESE = "[一-龥\u3040-ゟ゠-ヿ]+"


def in_bytes(*before, special=("<s>", "</s>"), normalizer=None, split=False, **more) -> Tokenizer:
    """Byte-level BPE with other pre-tokenizers or a normaliser before it."""
    model = byte_level(700, special)
    model.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(False, use_regex=not before)])
    if normalizer:
        model.normalizer = normalizer
    for key, value in more.items():
        setattr(model.model, key, value)
    return model


def like_sentencepiece(prepend: bool) -> Tokenizer:
    """Merges over a whole text, with bytes for unknown characters."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    model = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prepend else space
    if not prepend:
        model.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    ends = ["<s>", "</s>"] if prepend else ["<bos>", "<eos>"]
    lines = [line for text in REAL for line in (text.split(" ") if prepend else text.split("\n"))]
    special = ["<unk>", *ends]
    model.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=800, special_tokens=[*special, *bytes_]))
    state = json.loads(model.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # the bytes are ordinary entries of the model
    model = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prepend else parts)
    return model


def gpt_neox() -> Tokenizer:
    model = in_bytes(special=("<|endoftext|>",), normalizer=normalizers.NFC())
    model.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])  # not special
    model.post_processor = processors.ByteLevel()
    return model


def unigram() -> Tokenizer:
    """Its list has "</s>" with the best score, so text that spells it would end a document."""
    letters = sorted({letter for text in REAL for letter in text} - {" "})
    words = [f"▁{word}" for word in "the of a is data shards".split()]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(word, -4.5) for word in words] + [(letter, -6.0) for letter in letters]
    model = Tokenizer(models.Unigram(pieces, unk_id=2))
    model.normalizer = normalizers.NFKC()
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.add_special_tokens(["<pad>", "</s>", "<unk>"])
    model.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return model


def bert() -> Tokenizer:
    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer, model.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    model.train_from_iterator(REAL, trainers.WordPieceTrainer(vocab_size=600, special_tokens=special))
    model.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    model.enable_truncation(8)
    model.enable_padding(length=8)
    return model


def roberta() -> Tokenizer:
    model = in_bytes()
    model.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return model


def llama3() -> Tokenizer:
    rule = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    model = in_bytes(rule, special=("<|begin_of_text|>", "<|end_of_text|>"), ignore_merges=True)
    added = [("<|begin_of_text|>", 0)]
    template = processors.TemplateProcessing("<|begin_of_text|> $A", "<|begin_of_text|> $A $B", added)
    model.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return model


def split(*rules: str) -> list[pre_tokenizers.Split]:
    return [pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]


END, ENDS, BERTS = {"eos_token": "<|endoftext|>"}, {"bos_token": "<s>", "eos_token": "</s>"}, ("[CLS]", "[SEP]")
FAMILIES = {
    "GPT-2": (lambda: in_bytes(special=("<|endoftext|>",)), END | {"bos_token": "<|endoftext|>"}, True),
    "GPT-NeoX": (gpt_neox, END, False),
    "Llama 2": (lambda: like_sentencepiece(True), ENDS | {"add_bos_token": True}, "spaces"),
    "Gemma": (lambda: like_sentencepiece(False), {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}, "spaces"),
    "Llama 3": (llama3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, True),
    "Qwen": (
        lambda: in_bytes(*split(LLAMA3), special=("<|endoftext|>", "<|im_start|>"), normalizer=normalizers.NFC()),
        END | {"bos_token": None}, False,
    ),
    "Falcon": (
        lambda: in_bytes(pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(False), *split("[0-9]{3}")),
        ENDS, True,
    ),
    "DeepSeek": (
        lambda: in_bytes(*split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE), pre_tokenizers.Digits(True)), ENDS, True,
    ),
    "Bloom": (lambda: in_bytes(*split(" ?[^(\\s|[.,!?…。，、।۔،])]+")), ENDS, True),
    "RoBERTa": (roberta, ENDS, True),
    "T5": (unigram, {"eos_token": "</s>"}, False),
    "BERT": (bert, {"bos_token": "[CLS]", "eos_token": "[SEP]"}, False),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_json_comes_through(family, tmp_path):
    make, names, decodes = FAMILIES[family]
    model = make()
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "LlamaTokenizer"}))
    # the library itself encodes plain text
    model.no_padding()
    model.no_truncation()
    model.encode_special_tokens = True
    texts = [text for text in TEXTS if family != "T5" or "</s>" not in text]
    own = {names.get("bos_token"), None} > {None} and names["eos_token"] != names.get("bos_token")
    manifest = came_through(
        tmp_path, tmp_path / "made",
        lambda text: model.encode(text, add_special_tokens=False).ids, texts=texts, decodes=decodes, adds_bos=own,
    )  # fmt: skip
    if family == "T5":
        tokenizer = manifest.load_tokenizer()
        assert tokenizer.eos_id not in tokenizer.encode(SPELLED) and "".join(tokenizer.decode(tokenizer.encode("</s>")))


def changed(folder: Path, state: dict, names: dict) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_an_end_of_text_that_is_not_special_is_text_where_a_text_spells_it(tmp_path):
    model = byte_level(300)
    model.add_tokens([AddedToken("</s>"), AddedToken("<s>", lstrip=True)])
    assert 300 in model.encode("a </s> b").ids  # control: with the tokenizer as it was given
    tokenizer = load_tokenizer(changed(tmp_path / "t", json.loads(model.to_str()), ENDS))
    assert not {300, 301} & set(tokenizer.encode("a </s> b <s>")) and (tokenizer.bos_id, tokenizer.eos_id) == (301, 300)
    tokenizer.save(tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export", split_special_tokens=True)
    assert theirs.encode("a </s>") == [301, *tokenizer.encode("a </s>")]


def test_an_end_of_text_that_text_becomes_is_refused(tmp_path):
    state = json.loads(byte_level(300).to_str())
    folder = changed(tmp_path / "t", state, {"eos_token": "e"})
    with pytest.raises(
        UserError, match="^tokenizer '.*': it encodes the text 'e' as 'e' or None, which separate documents"
    ):
        load_tokenizer(folder)


def test_a_tokenizer_with_dropout_encodes_as_without(tmp_path):
    model = in_bytes(dropout=0.3)
    tokenizer = changed(tmp_path / "random", json.loads(model.to_str()), ENDS)
    assert model.encode(REAL[1] * 5).ids != model.encode(REAL[1] * 5).ids  # control
    model.model.dropout, model.encode_special_tokens = None, True
    came_through(
        tokenizer, tmp_path / "made", lambda text: model.encode(text, add_special_tokens=False).ids, texts=REAL
    )
    # one that has no effect stays, and so does the checksum
    without = json.loads(model.to_str())
    without["model"]["dropout"] = 0.0
    tokenizer = load_tokenizer(changed(tmp_path / "never", without, ENDS))
    tokenizer.save(tmp_path / "export")
    assert json.loads((tmp_path / "export" / "tokenizer.json").read_text())["model"]["dropout"] == 0.0


def test_the_keys_of_tokenizer_json_are_those_that_were_judged():
    """A new one may be no function of the text: `from_folder` clears dropout, truncation, padding and the post-processor."""
    made = [
        models.BPE({"a": 0}, []),
        models.Unigram([("a", 0.0)], 0),
        models.WordPiece({"a": 0}),
        models.WordLevel({"a": 0}),
    ]
    state = [json.loads(Tokenizer(model).to_str()) for model in made]
    assert " ".join(state[0]) == (
        "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model"
    )
    assert [" ".join(one["model"]) for one in state] == [
        "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges vocab merges",
        "type unk_id vocab byte_fallback",
        "type unk_token continuing_subword_prefix max_input_chars_per_word vocab",
        "type vocab unk_token",
    ]
    sampling = state[1] | {"model": state[1]["model"] | {"alpha": 0.5, "nbest_size": 5}}  # attributes, not of the file
    assert Tokenizer.from_str(json.dumps(sampling)).model.alpha is None


def test_an_id_that_the_library_does_not_keep_is_refused(tmp_path):
    model = byte_level(300)
    model.add_special_tokens(["</s>"])
    state = json.loads(model.to_str())
    state["added_tokens"][0]["id"] = 305
    with pytest.raises(UserError, match="its entry '</s>' should have id 305, but gets 300"):
        load_tokenizer(changed(tmp_path / "t", state, {"eos_token": "</s>"}))


PanicException = type("PanicException", (BaseException,), {})
"""Of the name and base by which a failure in Rust code reaches Python."""


@pytest.mark.parametrize("error", [PanicException, Exception])
def test_a_failure_of_the_library_is_a_one_line_error(error, tmp_path, monkeypatch):
    model = byte_level(300)
    model.add_special_tokens(["</s>", "<s>"])
    folder = changed(tmp_path / "t", json.loads(model.to_str()), ENDS)
    tokenizer = load_tokenizer(folder)
    monkeypatch.setattr(tokenizer, "_model", Mock(encode_batch_fast=Mock(side_effect=error("made by the test"))))
    monkeypatch.setattr("pc_recipe.data.tokenizer_formats.build", Mock(side_effect=error("made by the test")))
    for use in (lambda: tokenizer.encode("a"), lambda: load_tokenizer(folder)):
        with pytest.raises(UserError, match=r"its library fails \(made by the test\)$"):
            use()


def test_only_failures_of_the_library_are_taken_for_such(monkeypatch):
    tokenizer = load_tokenizer("mistral-common")
    for error in (KeyboardInterrupt, ValueError):
        monkeypatch.setattr(tokenizer, "_model", Mock(encode_batch_fast=Mock(side_effect=error)))
        with pytest.raises(error):
            tokenizer.encode("a")


# --- data folders of format 1 -----------------------------------------------------------------------


@pytest.fixture
def older(shards, tmp_path):
    """A data folder of the default tokenizer, as an older version wrote it."""
    folder = shutil.copytree(shards.folder, tmp_path / "older")
    return make_format_1(folder, {"tokenizer.model": _mistral_model().read_bytes()}, "sentencepiece")


def test_an_older_folder_has_the_same_tokenizer(older, shards, parquet_folder):
    manifest = Manifest.read(older)
    assert manifest.tokenizer.sha256 != shards.tokenizer.sha256 == manifest.load_tokenizer().sha256
    require_same_tokenizer(shards, manifest)
    content = json.loads((older / "manifest.json").read_text())
    lost = older / manifest.shards["train"][2].tokens_file
    whole = lost.read_bytes()
    lost.unlink()
    assert tokenize(str(parquet_folder), older, validation_fraction=0.2) == manifest
    now = json.loads((older / "manifest.json").read_text())
    assert now.pop("content_sha256") == manifest.content_sha256  # format 1 did not have it
    assert lost.read_bytes() == whole and now == content


def test_an_older_folder_whose_tokenizer_was_exchanged_or_cannot_be_converted(older, tmp_path):
    (older / "tokenizer/tokenizer.model").write_bytes(train())
    with pytest.raises(UserError, match="older/tokenizer is not the one that made the shards"):
        Manifest.read(older).load_tokenizer()
    make_format_1(older, {"tokenizer.model": train(model_type="unigram")}, "sentencepiece")
    manifest = Manifest.read(older)
    require_same_tokenizer(manifest, Manifest.read(older))  # training on it goes on
    with pytest.raises(UserError, match="is not of type BPE"):
        manifest.load_tokenizer()

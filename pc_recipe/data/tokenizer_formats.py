"""Converts any description of a tokenizer to one tokenizer.json, or refuses.

It refuses a file with settings that tokenizer.json cannot express. Then it compares the result with the library that the
file is made for, on every entry of the vocabulary, alone and in texts of many entries.
"""

import hashlib
import json
import os
import random
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pc.errors import UserError
from pc_recipe.files import look

FILE, SETTINGS, SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
TEKKEN = "tekken.json"
NORMAL, UNKNOWN, CONTROL, BYTE, BPE = 1, 2, 3, 6, 2  # types of SentencePiece's entries, and of its models
NO_EOS = "it has no end-of-text token to separate documents"
END = "<|endoftext|>"  # of tiktoken's encodings
LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
LLAMA3_ENDS = "<|begin_of_text|>", "<|end_of_text|>"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TOGETHER = 50  # texts compared at a time, and entries of the vocabulary in one of them
if TYPE_CHECKING:
    import tiktoken

Piece = TypeVar("Piece", str, bytes)


@dataclass(frozen=True)
class Converted:
    """A tokenizer.json, its BOS and EOS, and what it was made of."""

    kind: str
    """ "sentencepiece", "huggingface" or "tiktoken"."""
    content: bytes
    bos: str | None
    eos: str
    original: Callable[[list[str]], list[list[int]]] | None = None
    """Ids of texts by the library that the given file is made for; None if that is `tokenizers` too."""
    sentencepiece: bytes | None = None
    """The SentencePiece model that it was made of or that lay beside it, which may give other ids."""

    def require_equal(self, texts: Iterable[str]) -> None:
        """Raise a `UserError` for a text to which the conversion gives other ids."""
        if self.original is None:
            return
        model, texts = build(self.content), iter(texts)
        while some := list(islice(texts, TOGETHER)):
            made = [one.ids for one in model.encode_batch_fast(some, add_special_tokens=False)]
            for text, ids, right in zip(some, made, self.original(some), strict=True):
                if ids != right:
                    raise UserError(f"as {FILE} it would encode {text!r:.60} differently")


@contextmanager
def without_panics() -> Iterator[None]:
    """Raise a `UserError` where Rust code fails: by a bare `Exception`, or by `PanicException`, which is none."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"its library fails ({error})") from None


@lru_cache(maxsize=2)
def build(content: bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json; text that spells a special entry is text to it. Cached: do not change it."""
    model = Tokenizer.from_str(content.decode())
    model.encode_special_tokens = True
    return model


def from_folder(folder: Path) -> Converted:
    """tokenizer.json as it is, except that it puts BOS in front of a text, and neither adds more, nor truncates, pads or
    drops merges at random: the ids depend on the text alone."""
    given, settings = look.read(folder / FILE) or b"", json.loads(look.read(folder / SETTINGS) or b"{}")
    names = [settings.get(key) for key in ("bos_token", "eos_token")]
    bos, eos = (name["content"] if isinstance(name, dict) else name for name in names)
    if bos == eos:  # GPT-2's: one of them separates documents
        bos = None
    if eos is None:
        raise UserError(f"{NO_EOS}: {SETTINGS} names no eos_token")
    content, ids = json.loads(given), build(given).get_vocab(with_added_tokens=True)
    added = {entry["content"]: entry for entry in content["added_tokens"]}
    for name in filter(None, (bos, eos)):
        if name not in ids:
            raise UserError(f"{SETTINGS} names {name!r}, which {FILE} does not have")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added[name] = {"id": ids[name], "content": name} | flags | added.get(name, {}) | {"special": True}
    for name, entry in added.items():
        if ids[name] != entry["id"]:
            raise UserError(f"its entry {name!r} should have id {entry['id']}, but gets {ids[name]}")
    content["added_tokens"] = sorted(added.values(), key=lambda entry: entry["id"])
    if content["model"].get("type") == "Unigram":  # where they have the best score, so text would be encoded as them
        vocab = content["model"]["vocab"]
        content["model"]["vocab"] = [[piece, -1e6 if piece in (bos, eos) else score] for piece, score in vocab]
    if content["model"].get("dropout"):  # of BPE: with it the library encodes at random; no other key of a model is
        content["model"]["dropout"] = None
    content |= {"truncation": None, "padding": None, "post_processor": None}
    if bos is not None:
        content["post_processor"] = json.loads(_bos_first(bos, ids[bos]).__getstate__())
    # the same bytes if nothing changes, so that a converted file keeps its checksum
    changed = content != json.loads(given)
    kept = json.dumps(content).encode() if changed else given
    return Converted("huggingface", kept, bos, eos, sentencepiece=look.read(folder / SENTENCEPIECE))


@cache  # a second
def from_sentencepiece(file: bytes) -> Converted:
    """A SentencePiece model of type BPE, such as Llama 2's or the first Mistral's."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    read = SentencePieceProcessor(model_proto=file)
    described = sentencepiece_model_pb2.ModelProto.FromString(file)  # type: ignore[attr-defined]  # made when imported
    _require_bpe_of_the_text_itself(described)
    pieces, unknown = described.pieces, described.pieces[read.unk_id()].piece
    vocabulary = {piece.piece: index for index, piece in enumerate(pieces)}
    merges = _list_merges({piece.piece: -piece.score for piece in pieces if piece.type == NORMAL})
    model = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    mark, unmark = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    model.normalizer, model.decoder = mark, decoders.Sequence([unmark, decoders.ByteFallback(), decoders.Fuse()])
    if described.normalizer_spec.add_dummy_prefix:
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark])
        model.decoder = decoders.Sequence([model.decoder, decoders.Strip(" ", 1, 0)])
    special = [piece.piece for piece in pieces if piece.type in (UNKNOWN, CONTROL)]
    bos, eos = (pieces[i].piece if i >= 0 else None for i in (read.bos_id(), read.eos_id()))
    texts = [piece.piece.replace("▁", " ") for piece in pieces]
    encode = partial(read.encode, num_threads=1)
    made = _compared("sentencepiece", model, vocabulary, special, (bos, eos), encode, texts)
    return replace(made, sentencepiece=file)


def _require_bpe_of_the_text_itself(model: Any) -> None:
    """Raise a `UserError` for a SentencePiece model of another kind, or that does not encode every text as it is."""
    trainer, rules = model.trainer_spec, model.normalizer_spec
    others = [piece.piece for piece in model.pieces if piece.type not in (NORMAL, UNKNOWN, CONTROL, BYTE)]
    reasons = {
        "is not of type BPE": trainer.model_type != BPE,
        f"normalises text ({rules.name})": bool(
            rules.precompiled_charsmap + model.denormalizer_spec.precompiled_charsmap
        ),
        "removes spaces": rules.remove_extra_whitespaces,
        "marks no spaces, or marks them behind words": not rules.escape_whitespaces
        or trainer.treat_whitespace_as_suffix,
        "has no byte fallback, so that characters are lost": not trainer.byte_fallback,
        f"has user-defined or unused symbols: {', '.join(others[:3])}": bool(others),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"it is a SentencePiece model that {reason}; {FILE} cannot do the same")


def from_tiktoken(name: str) -> Converted:
    """One of tiktoken's named encodings, downloaded when first used. They have no BOS; EOS is `<|endoftext|>`."""
    import tiktoken

    # tiktoken's default is the shared temporary folder, where another user may have put something else.
    cache = os.environ.get("DATA_GYM_CACHE_DIR", os.path.expanduser("~/.cache/pc-layer"))
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", cache)
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # of the network; requests' errors are OSErrors
        raise UserError(f"it is an encoding of tiktoken that cannot be downloaded: {error}") from error
    special = {name: number for number, name in {n: name for name, n in encoding._special_tokens.items()}.items()}
    return _from_encoding(encoding, special, (None, END))


def from_tekken(path: Path) -> Converted:
    """Mistral's tekken.json. Its special entries come first, so an id is tiktoken's plus their number."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    try:
        tekken = Tekkenizer.from_file(path)
    except (AssertionError, ValueError, LookupError, TypeError, AttributeError) as error:  # some list the vocabulary
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.100}"
        raise UserError(f"{path} is no tekken.json that mistral_common reads ({reason})") from None
    names = tekken.vocab()
    special = {name: number for number, name in enumerate(names[: tekken.num_special_tokens])}
    return _from_encoding(tekken._model, special, (names[tekken.bos_id], names[tekken.eos_id]), len(special))


def from_ranks(file: bytes) -> Converted:
    """Llama 3's tokenizer.model, a list of tiktoken's ranks: pattern and special entries are in Llama's code only."""
    import tiktoken

    if hashlib.sha256(file).hexdigest() != LLAMA3_SHA256:
        raise UserError(
            f"it lists tiktoken's ranks, without pattern and special entries; give the folder of its {FILE}"
        )
    ranks = {b64decode(entry): int(rank) for entry, rank in map(bytes.split, file.splitlines())}
    names = [*LLAMA3_ENDS, *(f"<|reserved_special_token_{number}|>" for number in range(254))]
    special = {name: len(ranks) + number for number, name in enumerate(names)}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    return _from_encoding(encoding, special, LLAMA3_ENDS)


def _from_encoding(encoding: "tiktoken.Encoding", special: dict[str, int], names, first: int = 0) -> Converted:
    """Of an encoding of tiktoken, whose ids begin at `first`; names: of BOS and EOS."""
    # its entries and its pattern are in private attributes only
    ranks, pattern = {entry: first + rank for entry, rank in encoding._mergeable_ranks.items()}, encoding._pat_str
    kept, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    letters = [chr(byte if byte in kept else next(others)) for byte in range(256)]  # of the library's byte-level models
    written = {entry: "".join(letters[byte] for byte in entry) for entry in ranks}
    merges = [(written[left], written[right]) for left, right in _list_merges(ranks)]
    # with the special ones, to which the library would give the next free ids
    vocabulary = {written[entry]: rank for entry, rank in ranks.items()} | special
    split = pre_tokenizers.Split(Regex(_to_oniguruma(pattern)), "isolated")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    # With `ignore_merges`, a word that is an entry becomes it. It must not become a special one.
    becomes_special = any(len(words.pre_tokenize_str(name)) == 1 for name in special)
    model = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=not becomes_special))
    model.pre_tokenizer, model.decoder = words, decoders.ByteLevel()

    def encode(texts: list[str]) -> list[list[int]]:
        return [[first + number for number in ids] for ids in encoding.encode_ordinary_batch(texts, num_threads=1)]

    texts = [*(entry.decode(errors="ignore") for entry in ranks), *special]
    return _compared("tiktoken", model, vocabulary, list(special), names, encode, texts)


def _to_oniguruma(pattern: str) -> str:
    """A Rust regular expression for Oniguruma, to which "$" is the end of a line and "+" after "{1,3}" repeats it."""
    repeated = re.sub(r"(\\p\{\w+\}|\\.|\[(?:\\.|[^\]\\])*\]|[^\\])(\{\d+(?:,\d*)?\})\+", r"(?>\1\2)", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", repeated)


def _list_merges(ranks: Mapping[Piece, float]) -> list[tuple[Piece, Piece]]:
    """All pairs that make an entry, in the order in which both libraries merge neighbours: lowest rank of the entry first.

    Of equal ones they merge the first in the text. In a text A B C where A B and B C make the same entry, that is A B;
    this entry also begins with B. Entries of equal rank may only be runs of one character, which grow from the left.
    """
    pairs = []
    for piece, rank in ranks.items():
        for end in range(1, len(piece)):
            left, right = piece[:end], piece[end:]
            if left in ranks and right in ranks:
                pairs.append((rank, not piece.startswith(right), -end, left, right))
    pairs.sort()
    for _, tied in groupby(pairs, lambda pair: pair[0]):
        entries = sorted({left + right for *_, left, right in tied})
        if len(entries) > 1 and len(set(chain(*entries))) > 1:  # as of words that were added to a finished model
            raise UserError(
                f"its entries {entries[0]!r} and {entries[1]!r} have the same score, so which is made depends on their "
                f"places in the text; {FILE} cannot do the same: give each entry a score of its own"
            )
    return [(left, right) for *_, left, right in pairs]


def _bos_first(bos: str, bos_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, bos_id)])


def _compared(kind, model, vocabulary, special, names, original, texts) -> Converted:
    """The conversion to `model`, with special entries, after a comparison with the original."""
    bos, eos = names
    if eos is None:
        raise UserError(NO_EOS)
    model.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    if bos is not None:
        model.post_processor = _bos_first(bos, vocabulary[bos])
    content = model.to_str().encode()
    converted = Converted(kind, content, bos, eos, original)
    if build(content).get_vocab(with_added_tokens=True) != vocabulary:
        raise UserError(f"as {FILE} its entries would have other ids")
    converted.require_equal(combine(texts))
    return converted


def combine(entries: list[str]) -> Iterator[str]:
    """Test texts of a vocabulary: each entry, all entries joined in two orders, runs of characters often repeated."""
    yield from entries
    for order in (entries, random.Random(0).sample(entries, len(entries))):
        yield from ("".join(order[start : start + TOGETHER]) for start in range(0, len(order), TOGETHER))
    for character in (" ", "\n", "\r\n", "\t", "0", "a", "."):
        yield from (f"x{character * length}x {character * length}" for length in (*range(70), 10_000))

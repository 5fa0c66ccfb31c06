"""Text to token ids by one `tokenizer.json`, which `pc_recipe.data.tokenizer_formats` makes of whatever is given.

The same file encodes the shards and is copied to the data folder and exports, so all give the same ids:

- Text that spells BOS or EOS ("</s>") is encoded as ordinary characters. Other programs encode it as the entry, since
  chat templates and fine-tuning write entries into texts.
- BOS stands in front of each document, EOS behind it.
- Encoding runs in the calling thread: work is parallelised over processes, not threads.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tokenizers import pre_tokenizers

from pc.errors import UserError
from pc_recipe.data import tokenizer_formats
from pc_recipe.data.tokenizer_formats import FILE, SENTENCEPIECE, SETTINGS, TEKKEN, Converted
from pc_recipe.files import look
from pc_recipe.files.atomic import write_atomically

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerFast

DEFAULT_TOKENIZER = "mistral-common"
TIKTOKEN = "tiktoken.txt"  # names an encoding, in data folders of format 1


class Tokenizer:
    """A tokenizer.

    Attributes:
        name: as the user gave it.
        kind: what it was converted from: "sentencepiece", "huggingface" or "tiktoken".
        bos_id: None if the tokenizer has no BOS.
        vocab_size: ids are below it; some of them may have no entry.
        sha256: of everything that determines the ids.
    """

    def __init__(self, name: str, converted: Converted):
        self.name, self.kind, self._converted = name, converted.kind, converted
        self._model = tokenizer_formats.build(converted.content)
        self.bos_id = None if converted.bos is None else self._model.token_to_id(converted.bos)
        self.eos_id = self._model.token_to_id(converted.eos)
        self.vocab_size = 1 + max(self._model.get_vocab(with_added_tokens=True).values())
        self.sha256 = self._sha256(converted.content)

    def _sha256(self, content: bytes) -> str:
        return hashlib.sha256(f"bos={self.bos_id} eos={self.eos_id}\n".encode() + content).hexdigest()

    def has_checksum(self, sha256: str) -> bool:
        """Whether it is the tokenizer of this checksum, or that one after transformers wrote its file again, on many lines."""
        return sha256 in (self.sha256, self._sha256(self._model.to_str().encode()))

    @property
    def names(self) -> dict[str, str]:
        """Its name and checksum, as runs and exports store them."""
        return {"name": self.name, "sha256": self.sha256}

    def gives_the_ids_of(self, other: "Tokenizer") -> bool:
        """Whether two tokenizers of different checksums have the same entries and give the same ids."""
        vocabulary, theirs = (which._model.get_vocab(with_added_tokens=True) for which in (self, other))
        if vocabulary != theirs or (self.bos_id, self.eos_id) != (other.bos_id, other.eos_id):
            return False
        texts = list(tokenizer_formats.combine([name.replace("▁", " ") for name in vocabulary]))
        return self.encode_batch(texts) == other.encode_batch(texts)

    def require_equal(self, texts: Sequence[str]) -> None:
        """Raise a `UserError` for a text to which the original tokenizer gives other ids."""
        try:
            self._converted.require_equal(texts)
        except UserError as error:
            raise UserError(f"tokenizer {self.name!r}: {error}") from None

    def count_changed(self, texts: Sequence[str]) -> int:
        """How many texts decoding does not restore; leading spaces do not count, as the tokenizer may add one."""
        back = map(self.decode, self.encode_batch(texts))
        return sum(text.lstrip(" ") != other.lstrip(" ") for text, other in zip(texts, back, strict=True))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without BOS and EOS."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with tokenizer_formats.without_panics():
            return [one.ids for one in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    @property
    def content(self) -> bytes:
        """Its tokenizer.json."""
        return self._converted.content

    @property
    def entries(self) -> list[str]:
        """Its vocabulary."""
        return list(self._model.get_vocab(with_added_tokens=True))

    @property
    def text_bytes(self) -> np.ndarray | None:
        """Bytes of UTF-8 that each id stands for [vocab_size], so that their sum over documents is the size of the text; None
        if the file does not say so, or not every byte has a token. EOS takes back the space that some tokenizers put before
        a document."""
        decoder = json.dumps(json.loads(self.content).get("decoder"), ensure_ascii=False)
        is_byte_level, vocabulary = '"ByteLevel"' in decoder, self._model.get_vocab(with_added_tokens=True)
        single = pre_tokenizers.ByteLevel.alphabet() if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        # else some text becomes the entry for what is unknown, or nothing
        is_lossless = (is_byte_level or self.has_byte_fallback) and all(entry in vocabulary for entry in single)
        if not is_lossless or not (is_byte_level or "▁" in decoder):
            return None
        added = {index: entry.content for index, entry in self._model.get_added_tokens_decoder().items()}
        sizes = np.zeros(self.vocab_size, np.int64)
        for entry, index in vocabulary.items():
            if index in added:
                sizes[index] = len(entry.encode())
            elif is_byte_level:
                sizes[index] = len(entry)  # a character for each byte
            elif re.fullmatch("<0x[0-9A-F]{2}>", entry):
                sizes[index] = 1
            else:
                sizes[index] = len(entry.replace("▁", " ").encode())
        if self.bos_id is not None:
            sizes[self.bos_id] = 0
        sizes[self.eos_id] = -self._begins_with_space
        return sizes

    def documents(self, texts: Sequence[str], encode: Callable[[Sequence[str]], Sequence] | None = None) -> np.ndarray:
        """Tokens of all texts, each between BOS and EOS [total].

        encode: what encodes them in place of `encode_batch`, to the same ids.

        Raises:
            UserError: the tokenizer encodes text as BOS or EOS.
        """
        dtype, parts = smallest_dtype(self.vocab_size), []
        lead, end = np.array([] if self.bos_id is None else [self.bos_id], dtype), np.array([self.eos_id], dtype)
        for text, encoded in zip(texts, (encode or self.encode_batch)(texts), strict=True):
            ids = np.asarray(encoded).astype(dtype)
            if np.isin(ids, [*lead, *end]).any():
                raise UserError(
                    f"tokenizer {self.name!r}: it encodes the text {text!r:.60} as {self._converted.eos!r} or "
                    f"{self._converted.bos!r}, which separate documents; name other entries in {SETTINGS}"
                )
            parts += [lead, ids, end]
        return np.concatenate(parts)

    def save(self, folder: str | Path, max_length: int | None = None) -> None:
        """Write the files with which `load_tokenizer(folder)` and transformers give the same ids, and the SentencePiece model
        for programs that read it first, such as llama.cpp's converter.

        To transformers, as with any Llama's folder, text that spells a special entry is that entry.

        max_length: the model's longest sequence.
        """
        # The class that reads tokenizer.json unchanged, by the name that old and new transformers know. A class such as
        # LlamaTokenizer would rebuild parts of it and change ids.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._settings(max_length)}
        write_atomically(Path(folder, FILE), self._converted.content)
        write_atomically(Path(folder, SETTINGS), json.dumps(settings, indent=2) + "\n")
        if self.sentencepiece is not None:
            write_atomically(Path(folder, SENTENCEPIECE), self.sentencepiece)

    @property
    def has_byte_fallback(self) -> bool:
        """Whether it writes unknown characters as bytes, as SentencePiece's do."""
        return bool(json.loads(self._converted.content)["model"].get("byte_fallback"))

    @property
    def is_default(self) -> bool:
        """Whether it is mistral-common's, under whatever name."""
        return self.sentencepiece == _mistral_model().read_bytes()

    @cached_property
    def sentencepiece(self) -> bytes | None:
        """The SentencePiece model of the same ids, if it was made from one, or one lay beside its file."""
        file = self._converted.sentencepiece
        try:
            made = None if file is None else Tokenizer(self.name, tokenizer_formats.from_sentencepiece(file))
        except (UserError, RuntimeError):  # of another type, or damaged
            return None
        return file if made and (made.sha256 == self.sha256 or made.gives_the_ids_of(self)) else None

    def to_transformers(self, max_length: int | None = None) -> "PreTrainedTokenizerFast":
        """The same for Hugging Face's tools, with BOS in front of each text."""
        from transformers import PreTrainedTokenizerFast

        model = deepcopy(self._model)  # which transformers changes
        # "</s>" in a text is text, as in training
        return PreTrainedTokenizerFast(tokenizer_object=model, split_special_tokens=True, **self._settings(max_length))

    def _settings(self, max_length: int | None) -> dict[str, Any]:
        eos = self._converted.eos
        names = {"bos_token": self._converted.bos, "eos_token": eos, "pad_token": eos}  # tools need one for padding
        settings = {
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            # a fact that transformers 4 and llama.cpp take from here
            "add_prefix_space": self._begins_with_space,
        }
        return {key: value for key, value in (names | settings).items() if value is not None}

    @property
    def _begins_with_space(self) -> bool:
        """Whether it puts a space before each text."""
        letter = "".join(self._model.encode("a", add_special_tokens=False).tokens)
        return letter.startswith(("▁", "Ġ"))


def smallest_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """uint16 if every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def load_tokenizer(reference: str | Path) -> Tokenizer:
    """Load a tokenizer, converted if it is no tokenizer.json yet.

    reference: "mistral-common" (32,000 entries, Apache-2.0, installed with this package), the name of a tiktoken
    encoding, a folder with tokenizer.json, tekken.json or tokenizer.model, or one of the latter two: Mistral's, and a
    SentencePiece model or Llama 3's list of ranks.

    Raises:
        UserError: there is none, or a tokenizer.json cannot give the same ids, or it encodes text as BOS or EOS.
    """
    name = str(reference)
    try:
        with tokenizer_formats.without_panics():
            tokenizer = Tokenizer(name, _convert(name, Path(os.path.expanduser(name))))
    except Exception as error:  # the libraries raise bare Exception
        raise UserError(f"tokenizer {name!r}: {error}") from error
    tokenizer.documents([entry for entry in (tokenizer._converted.bos, tokenizer._converted.eos) if entry])
    return tokenizer


def _convert(name: str, path: Path) -> Converted:
    import tiktoken

    if name == DEFAULT_TOKENIZER:
        path = _mistral_model()
    elif look.is_file(path / TIKTOKEN):
        return tokenizer_formats.from_tiktoken((path / TIKTOKEN).read_text())
    elif not look.is_there(path) and name in tiktoken.list_encoding_names():
        return tokenizer_formats.from_tiktoken(name)
    elif look.is_file(path / FILE):
        return tokenizer_formats.from_folder(path)
    if look.is_folder(path):
        path /= TEKKEN if look.is_file(path / TEKKEN) else SENTENCEPIECE
    if "tekken" in path.name and look.is_file(path):
        return tokenizer_formats.from_tekken(path)
    content, reason = look.read(path), "there is no such file"
    if content is not None:
        if re.match(rb"[\w+/]+=* \d+\s", content):
            return tokenizer_formats.from_ranks(content)
        try:
            return tokenizer_formats.from_sentencepiece(content)
        except RuntimeError as error:
            reason = str(error)
    raise UserError(
        f"neither {DEFAULT_TOKENIZER!r}, a folder with {FILE}, a tiktoken encoding, a {TEKKEN}, nor a SentencePiece model "
        f"({reason})"
    )


def _mistral_model() -> Path:
    import mistral_common

    return Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"

"""Text to token ids: one interface for SentencePiece, Hugging Face and tiktoken tokenizers.

For all of them:

- Text that spells a control token ("</s>") is encoded as ordinary characters.
- Encoding runs in the calling thread: work is parallelised over processes, not threads.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from pc.errors import UserError

DEFAULT_TOKENIZER = "mistral-common"


class Tokenizer(ABC):
    """The common interface.

    Attributes:
        name: as the user gave it.
        kind: "sentencepiece", "huggingface" or "tiktoken".
        vocab_size: ids are 0 … vocab_size - 1.
        bos_id: None if the tokenizer has no BOS.
        files: {name: bytes} of the files that define it, stored with the shards.
        sha256: of everything that determines the ids.
    """

    kind: str

    def __init__(self, name: str, vocab_size: int, bos_id: int | None, eos_id: int | None, files: dict[str, bytes]):
        if eos_id is None:
            raise UserError(f"tokenizer {name!r} has no end-of-text token to separate documents")
        if bos_id == eos_id:  # GPT-2's: one of them separates documents
            bos_id = None
        self.name = name
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.files = files
        digest = hashlib.sha256(f"{self.kind} bos={bos_id} eos={eos_id}".encode())
        for file_name in sorted(files):
            digest.update(f"\n{file_name} {len(files[file_name])}\n".encode() + files[file_name])
        self.sha256 = digest.hexdigest()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without BOS and EOS."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        """Tokens of all texts, each between BOS and EOS [total]."""
        encoded = self.encode_batch(texts)
        if any(not {self.bos_id, self.eos_id}.isdisjoint(ids) for ids in encoded):
            raise RuntimeError(f"tokenizer {self.name!r} encoded text as control tokens")
        lead = [] if self.bos_id is None else [self.bos_id]
        stream = chain.from_iterable((*lead, *ids, self.eos_id) for ids in encoded)
        return np.fromiter(stream, smallest_dtype(self.vocab_size))


def smallest_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """uint16 if every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file, as used by Llama 2 and the first Mistral."""

    kind = "sentencepiece"

    def __init__(self, name: str, path: Path):
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(
                f"tokenizer {name!r}: neither {DEFAULT_TOKENIZER!r}, a folder with tokenizer.json, a tiktoken encoding, "
                f"nor a SentencePiece model ({error})"
            ) from error
        bos_id, eos_id = (i if i >= 0 else None for i in (self._model.bos_id(), self._model.eos_id()))
        super().__init__(name, self._model.vocab_size(), bos_id, eos_id, {"tokenizer.model": path.read_bytes()})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(list(texts), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """A folder with `tokenizer.json` and `tokenizer_config.json` (which names BOS and EOS)."""

    kind = "huggingface"
    FILES = ("tokenizer.json", "tokenizer_config.json")

    def __init__(self, name: str, folder: Path):
        import tokenizers

        try:
            files = {file: (folder / file).read_bytes() for file in self.FILES}
            self._model = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
            settings = json.loads(files["tokenizer_config.json"])
            names = [settings.get(key) for key in ("bos_token", "eos_token")]
            names = [name["content"] if isinstance(name, dict) else name for name in names]
            bos_id, eos_id = (None if name is None else self._model.token_to_id(name) for name in names)
            if unknown := [
                name for name, token_id in zip(names, (bos_id, eos_id), strict=True) if name and token_id is None
            ]:
                raise ValueError(f"tokenizer_config.json names {unknown[0]!r}, which tokenizer.json does not have")
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{folder} does not hold a readable tokenizer: {error}") from error
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # encode "</s>" in a text as ordinary text
        super().__init__(name, self._model.get_vocab_size(with_added_tokens=True), bos_id, eos_id, files)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return [one.ids for one in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


class TiktokenTokenizer(Tokenizer):
    """One of tiktoken's named encodings, downloaded when first used. They have no BOS; EOS is `<|endoftext|>`."""

    kind = "tiktoken"
    FILE = "tiktoken.txt"

    def __init__(self, encoding: str):
        import tiktoken

        try:
            self.model = tiktoken.get_encoding(encoding)
        except OSError as error:  # of the network; requests' errors are OSErrors
            raise UserError(f"tiktoken's encoding {encoding!r} cannot be downloaded: {error}") from error
        # The name is enough: tiktoken compares what it downloads with a checksum.
        super().__init__(encoding, self.model.n_vocab, None, self.model.eot_token, {self.FILE: encoding.encode()})

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.model.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids])


def load_tokenizer(reference: str | Path) -> Tokenizer:
    """Load a tokenizer.

    reference: "mistral-common" (32,000 entries, Apache-2.0, installed with this package), the name of a tiktoken
    encoding, a folder with tokenizer.json or tokenizer.model, or a SentencePiece `.model` file.
    """
    name = str(reference)
    if name == DEFAULT_TOKENIZER:
        return SentencePieceTokenizer(name, _mistral_model())
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        import tiktoken

        if name in tiktoken.list_encoding_names():
            return TiktokenTokenizer(name)
    if os.path.isfile(path / TiktokenTokenizer.FILE):  # of a data folder
        return TiktokenTokenizer((path / TiktokenTokenizer.FILE).read_text())
    if os.path.isdir(path) and os.path.isfile(path / "tokenizer.json"):
        return HuggingFaceTokenizer(name, path)
    return SentencePieceTokenizer(name, path / "tokenizer.model" if os.path.isdir(path) else path)


def _mistral_model() -> Path:
    import mistral_common

    return Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"

"""Text to token ids: one interface for SentencePiece, Hugging Face and tiktoken tokenizers.

For all of them:

- BOS and EOS are not added here; the shard writer adds them, once per document.
- Text that spells a control token ("</s>") is encoded as ordinary characters.
- Encoding runs in the calling thread: work is parallelised over processes, not threads.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pc.errors import UserError

DEFAULT_TOKENIZER = "mistral-common"


class Tokenizer(ABC):
    """The common interface.

    name: as the user gave it. kind: "sentencepiece", "huggingface" or "tiktoken".
    vocab_size: ids are 0 … vocab_size - 1. bos_id: None if the tokenizer has no BOS.
    files: name → bytes of the files that define it, stored with the shards.
    sha256: of everything that determines the ids.
    """

    kind: str

    def __init__(self, name: str, vocab_size: int, bos_id: int | None, eos_id: int | None, files: dict[str, bytes]):
        if eos_id is None:
            raise UserError(f"tokenizer {name!r} has no end-of-text token to separate documents")
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
    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Concatenated ids of all texts (uint32 [total]) and each text's number of ids (int64 [texts])."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file, as used by Llama 2 and the first Mistral."""

    kind = "sentencepiece"

    def __init__(self, name: str, path: Path):
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path} is not a SentencePiece model") from error
        bos_id, eos_id = (i if i >= 0 else None for i in (self._model.bos_id(), self._model.eos_id()))
        super().__init__(name, self._model.vocab_size(), bos_id, eos_id, {"tokenizer.model": path.read_bytes()})

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flatten(self._model.encode(list(texts), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """A folder with `tokenizer.json` and `tokenizer_config.json` (which names BOS and EOS)."""

    kind = "huggingface"
    FILES = ("tokenizer.json", "tokenizer_config.json")

    def __init__(self, name: str, folder: Path):
        import tokenizers

        files = {file: (folder / file).read_bytes() for file in self.FILES if (folder / file).is_file()}
        if "tokenizer_config.json" not in files:
            raise UserError(f"{folder} has no tokenizer_config.json, which names BOS and EOS")
        try:
            self._model = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
            settings = json.loads(files["tokenizer_config.json"])
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{folder} does not hold a readable tokenizer: {error}") from error
        if not isinstance(settings, dict):
            raise UserError(f"{folder}/tokenizer_config.json should be an object that names eos_token")
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # encode "</s>" in a text as ordinary text
        size = self._model.get_vocab_size(with_added_tokens=True)
        bos_id, eos_id = (self._id_of(settings.get(key), folder) for key in ("bos_token", "eos_token"))
        super().__init__(name, size, bos_id, eos_id, files)

    def _id_of(self, token: str | dict | None, folder: Path) -> int | None:
        content = token.get("content", "") if isinstance(token, dict) else token
        if content is None:
            return None
        token_id = self._model.token_to_id(content) if isinstance(content, str) else None
        if token_id is None:
            raise UserError(f"{folder}/tokenizer_config.json names {content!r}, which tokenizer.json does not have")
        return token_id

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return _flatten([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


class TiktokenTokenizer(Tokenizer):
    """One of tiktoken's named encodings. They have no BOS; EOS is `<|endoftext|>`."""

    kind = "tiktoken"

    def __init__(self, name: str):
        import tiktoken

        try:
            self._model = tiktoken.get_encoding(name)
        except ValueError as error:
            raise UserError(
                f"tokenizer {name!r} is neither a folder with tokenizer.json, a SentencePiece .model file, "
                f"{DEFAULT_TOKENIZER!r} nor a tiktoken encoding ({', '.join(tiktoken.list_encoding_names())})"
            ) from error
        except Exception as error:  # tiktoken downloads an encoding when first used
            raise UserError(f"tiktoken could not download its encoding {name!r}: {error}") from error
        # tiktoken encodings have no file, so write their definition to one that can be hashed.
        ranks = sorted(self._model._mergeable_ranks.items(), key=lambda item: item[1])
        definition = {
            "name": name,
            "pattern": self._model._pat_str,
            "special": self._model._special_tokens,
            "ranks_sha256": hashlib.sha256(b"\n".join(b"%s %d" % (t.hex().encode(), r) for t, r in ranks)).hexdigest(),
        }
        content = json.dumps(definition, indent=1, sort_keys=True).encode()
        super().__init__(
            name,
            self._model.n_vocab,
            None,
            self._model._special_tokens.get("<|endoftext|>"),
            {"tiktoken.json": content},
        )

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flatten([self._model.encode_ordinary(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


def load_tokenizer(reference: str | Path) -> Tokenizer:
    """Load a tokenizer.

    reference: "mistral-common" (32,000 entries, Apache-2.0, installed with this package), a folder with
    tokenizer.json or tokenizer.model, a SentencePiece `.model` file, or the name of a tiktoken encoding.
    """
    name = str(reference)
    if name == DEFAULT_TOKENIZER:
        return SentencePieceTokenizer(name, _mistral_model())
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # the name is too long, has an unknown ~user or a NUL
        raise UserError(f"tokenizer {name[:80]!r} is not a path: {error.args[-1] if error.args else error}") from None
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return HuggingFaceTokenizer(name, path)
        if (path / "tokenizer.model").is_file():
            return SentencePieceTokenizer(name, path / "tokenizer.model")
        raise UserError(f"{path} has neither tokenizer.json nor tokenizer.model")
    if path.is_file():
        return SentencePieceTokenizer(name, path)
    if len(path.parts) > 1 or path.suffix == ".model":
        raise UserError(f"tokenizer {name!r} does not exist")
    return TiktokenTokenizer(name)


def _mistral_model() -> Path:
    import mistral_common

    return Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"


def _flatten(encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    ids = np.fromiter((i for one in encoded for i in one), dtype=np.uint32, count=int(lengths.sum()))
    return ids, lengths

"""Encodes documents as token arrays, with the fast gigatoken where its results are checked to be the same."""

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from pc.data.tokenizers import SentencePieceTokenizer, Tokenizer

CHECKED_SHARE = 200  # one in this many documents is encoded both ways


class Encoder:
    """Adds BOS and EOS per document, and uses `gigatoken` for SentencePiece models if it is installed.

    gigatoken gave the same ids as SentencePiece on every text tried (docs/data.md), ten times faster. It is a new
    package, so one document in 200 is also encoded by SentencePiece, and a difference raises an error.
    """

    def __init__(self, tokenizer: Tokenizer, fast: bool = True):
        self.tokenizer = tokenizer
        self._fast = _gigatoken(tokenizer) if fast else None
        self._seen = 0

    @property
    def engine(self) -> str:
        return "gigatoken" if self._fast is not None else self.tokenizer.kind

    def documents(self, texts: Sequence[str], dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of all texts with BOS and EOS each [total], and tokens per document [texts]."""
        ids, lengths = self._encode(texts)
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        if len(ids) and (np.any(ids == eos) or (bos is not None and np.any(ids == bos))):
            raise RuntimeError(f"{self.engine} encoded text as control tokens")
        lead = 0 if bos is None else 1
        full = lengths + lead + 1
        ends = np.cumsum(full)
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, dtype=dtype)
        body = np.ones(len(tokens), dtype=bool)
        body[ends - 1] = False
        tokens[ends - 1] = eos
        if bos is not None:
            body[ends - full] = False
            tokens[ends - full] = bos
        tokens[body] = ids
        return tokens, full

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._fast is None:
            return self.tokenizer.encode_batch(texts)
        ids, lengths = _encode_fast(self._fast, texts)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        for i in range(-self._seen % CHECKED_SHARE, len(texts), CHECKED_SHARE):
            if ids[starts[i] : starts[i + 1]].tolist() != self.tokenizer.encode(texts[i]):
                raise RuntimeError(
                    f"gigatoken and {self.tokenizer.kind} disagree on {texts[i][:80]!r}…; "
                    "uninstall gigatoken to continue without it, and report the text"
                )
        self._seen += len(texts)
        return ids, lengths


def _gigatoken(tokenizer: Tokenizer):
    """A gigatoken tokenizer with the ids of `tokenizer`, or None if there is none."""
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    return _gigatoken_of(tokenizer.files["tokenizer.model"])


@lru_cache(maxsize=2)  # it takes half a second to build
def _gigatoken_of(model: bytes):
    try:
        import gigatoken
    except ImportError:
        return None
    try:
        definition = json.loads(gigatoken.Tokenizer.from_sentencepiece(model)._hf_json)
    except ValueError:  # gigatoken supports only BPE models with byte fallback
        return None
    # By default it reads "</s>" in a text as the control token.
    definition["added_tokens"] = [token for token in definition["added_tokens"] if not token["special"]]
    return gigatoken.Tokenizer.from_json(json.dumps(definition))


def _encode_fast(model, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    import awkward

    encoded = model.encode_batch(list(texts), parallel=False)
    lengths = awkward.to_numpy(awkward.num(encoded, axis=1)).astype(np.int64)
    return awkward.to_numpy(awkward.flatten(encoded)).astype(np.uint32, copy=False), lengths

"""fastokens, an optional encoder that is several times as fast as `tokenizers`, for as long as both give the same ids.

It reads the same tokenizer.json. That it always gives the same ids can be tried but not proved, so a job compares it on
every entry, on its first texts and on a sample of each unit. After a difference `tokenizers` encodes the rest of the job.
"""

import importlib
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from types import ModuleType

import numpy as np

from pc.errors import UserError
from pc_recipe.data.tokenizer_formats import combine, without_panics
from pc_recipe.data.tokenizers import Tokenizer

FASTOKENS, TRIED = "fastokens", "0.3.5"
CHECKED = 10 * 10**6
"""characters of a job's first texts that are compared"""
SAMPLE = 50
"""one of so many batches is compared in each unit"""
DIFFERS = "fastokens_differs.txt"
"""says in a job's folder that `tokenizers` encodes the rest of the job, and why"""


class OtherIds(Exception):
    """A text that fastokens encodes otherwise, or fails on."""


def load_library() -> ModuleType:
    try:
        return importlib.import_module(FASTOKENS)
    except ImportError as error:
        raise UserError(f"--engine {FASTOKENS} is not installed ({error}): pip install {FASTOKENS}=={TRIED}") from None


class FastEncoder:
    """Encodes by fastokens, on one core.

    Raises:
        UserError: it is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._right = tokenizer.encode_batch
        self._batches = 0
        os.environ["RAYON_NUM_THREADS"] = "1"  # when it first encodes, it starts so many
        try:
            library = importlib.import_module(FASTOKENS)
        except ImportError as error:
            raise UserError(
                f"--engine {FASTOKENS} is not installed ({error}): pip install {FASTOKENS}=={TRIED}"
            ) from None
        try:
            with without_panics():
                self._model = library.Tokenizer.from_json_str(tokenizer.content.decode())
        except (UserError, ValueError) as error:
            raise UserError(
                f"--engine {FASTOKENS} cannot read tokenizer {tokenizer.name!r} ({error}); leave it out"
            ) from None
        self._entries = [name.replace("▁", " ") for name in tokenizer.entries]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, without BOS and EOS, as by `Tokenizer.encode_batch`: [tokens], unsigned.

        Raises:
            OtherIds: it fails, or some text of a batch that is compared gets other ids.
        """
        try:
            with without_panics():
                flat, ends = self._model.encode_batch_flat(list(texts), split_special_tokens=True)
        except (UserError, ValueError, RuntimeError) as error:
            raise OtherIds(f"fastokens fails on one of {[text[:30] for text in texts]} ({error})") from None
        made = np.split(np.frombuffer(flat, np.uint32), np.frombuffer(ends, np.uint64)[1:-1].astype(np.int64))
        if self._batches % SAMPLE == 0:
            for text, ids, right in zip(texts, made, self._right(texts), strict=True):
                if ids.tolist() != right:
                    raise OtherIds(f"fastokens encodes {text!r:.60} differently")
        self._batches += 1
        return made

    def start_unit(self) -> None:
        """Compare the next batch."""
        self._batches = 0

    def check(self, texts: Iterable[str]) -> None:
        """Compare every entry of the tokenizer, texts of many entries, and the first `CHECKED` characters of `texts`."""
        tried, characters = combine(self._entries), 0
        while batch := list(islice(tried, SAMPLE)):
            self.start_unit()
            self.encode_batch(batch)
        for text in texts:
            self.start_unit()
            self.encode_batch([text])
            characters += len(text)
            if characters > CHECKED:
                break

"""Trains a byte-level BPE tokenizer on your own text, for models with a small vocabulary."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pc.errors import UserError
from pc_recipe.data.sources import divide_into_units, find_files, measure_files, read_texts
from pc_recipe.data.tokenizer_formats import Converted
from pc_recipe.data.tokenizers import Tokenizer

BOS, EOS = "<s>", "</s>"


def train_tokenizer(
    sources: Sequence[str], output: str | Path, vocab_size: int, megabytes: int, text_key: str = "text"
) -> int:
    """Train on the first `megabytes` of text in `sources` and write a Hugging Face folder; returns its vocabulary size.

    Deterministic: the same text and settings give the same files.

    Args:
        sources, text_key: where the text is (see `pc_recipe.data.tokenizing.tokenize`).
        output: folder for tokenizer.json and tokenizer_config.json.
        vocab_size: entries, including BOS and EOS.
        megabytes: amount of text to train on, in 10^6 bytes.

    Raises:
        UserError: no file, no such column or key, no text.
        WriteFailed: the file system refuses.
    """
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = _texts(sources, text_key, megabytes * 10**6)
    first = next(texts, None)
    if first is None:
        raise UserError(f"--input {' '.join(sources)}: there is no text in it")
    model.train_from_iterator(chain([first], texts), trainer)
    Tokenizer("trained", Converted("huggingface", model.to_str().encode(), BOS, EOS)).save(output)
    return model.get_vocab_size()


def _texts(sources: Sequence[str], text_key: str, text_bytes: int) -> Iterator[str]:
    for file in find_files(sources, Counter()):  # one by one: a Hub dataset has thousands
        for unit in divide_into_units(measure_files([file], text_key), math.inf):
            for text in read_texts(unit, text_key, Counter(), Counter()):
                if text_bytes <= 0:
                    return
                text_bytes -= len(text.encode())
                yield text

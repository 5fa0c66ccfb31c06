"""Trains a byte-level BPE tokenizer on your own text, for models with a small vocabulary."""

import math
from collections.abc import Iterator
from pathlib import Path

from pc_recipe.data.sources import divide_into_units, find_files, measure_files, read_texts

BOS, EOS = "<s>", "</s>"


def train_tokenizer(source: str, output: str | Path, vocab_size: int, megabytes: int, text_column: str = "text") -> int:
    """Train on the first `megabytes` of text in `source` and write a Hugging Face folder; returns its vocabulary size.

    Deterministic: the same text and settings give the same files.

    Args:
        source: files with text (see `pc_recipe.data.sources.find_files`).
        output: folder for tokenizer.json and tokenizer_config.json.
        vocab_size: entries, including BOS and EOS.
        megabytes: amount of text to train on, in 10^6 bytes.

    Raises:
        UserError: no file, no such column.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(_texts(source, text_column, megabytes * 10**6), trainer)
    PreTrainedTokenizerFast(tokenizer_object=model, bos_token=BOS, eos_token=EOS).save_pretrained(output)
    return model.get_vocab_size()


def _texts(source: str, text_column: str, text_bytes: int) -> Iterator[str]:
    for file in find_files(source):  # one by one: a Hub dataset has thousands
        for unit in divide_into_units(measure_files([file], text_column), math.inf):
            for text in read_texts(unit, text_column):
                if text_bytes <= 0:
                    return
                text_bytes -= len(text)
                yield text.decode("utf-8", errors="replace")

"""Small tokenizers, most of single bytes, and weights folders of small Llamas, made in milliseconds."""

import io
import json
from pathlib import Path

import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SIZE = 258  # entries


def make_tokenizer(folder: Path, reverse: bool = False, without: str = "") -> Path:
    """Bytes, <s> and </s>; reverse: the same entries with other ids. `without`: letters of bytes to leave out."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*without}, reverse=reverse)
    model = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def make_sentencepiece(file: Path, **options) -> Path:
    """A SentencePiece model like Llama 2's, of some 300 entries; options: the trainer's."""
    like_llama = dict(
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        vocab_size=300, hard_vocab_limit=False, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    made = io.BytesIO()
    sentences = iter(["the river carries the water to the sea"] * 20)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=made, **like_llama | options)
    file.write_bytes(made.getvalue())
    return file


def make_llama(folder: Path, seed: int = 0, **save) -> LlamaForCausalLM:
    """A Llama with random weights, in a folder as transformers writes it; save: options of `save_pretrained`."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=SIZE, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )  # fmt: skip
    model.save_pretrained(folder, **save)
    return model.eval()

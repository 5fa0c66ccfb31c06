"""The exported tokenizer gives the same ids as in training."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pc import UserError
from pc_recipe.data import hf_tokenizer as tokenizers
from pc_recipe.data.tokenizers import load_tokenizer

TRAINING = load_tokenizer("mistral-common")
CONVERTED = tokenizers.to_hugging_face(TRAINING)


@given(st.text(st.sampled_from("ab .\n\t<s>/▁é漢🙂\u200b0\r"), max_size=40) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_ids_equal_the_training_ones(text):
    # lone surrogates are not text: neither tokenizer accepts them
    text = text.encode(errors="ignore").decode()
    assert CONVERTED.encode(text, add_special_tokens=False) == TRAINING.encode(text)


def test_bos_in_front_control_tokens_stay_text_and_text_comes_back():
    text = "A</s><s>,  two spaces\nand naïve 漢字."
    ids = CONVERTED.encode(text)
    assert ids[0] == TRAINING.bos_id and not {TRAINING.bos_id, TRAINING.eos_id} & set(ids[1:])
    assert CONVERTED.decode(ids, skip_special_tokens=True) == text


def test_saved_files_give_the_same_in_transformers_and_here(tmp_path):
    tokenizers.save(CONVERTED, tmp_path)
    loaded, training = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    again = tokenizers.to_hugging_face(training)
    for text in tokenizers.PROBES:
        assert loaded.encode(text) == again.encode(text) == [1, *training.encode(text)] == [1, *TRAINING.encode(text)]
    assert (loaded.bos_token_id, loaded.eos_token_id, len(loaded)) == (1, 2, 32_000)


def test_a_tiktoken_encoding_is_converted(tiny_encoding, tmp_path):
    training = load_tokenizer(tiny_encoding)
    tokenizers.save(tokenizers.to_hugging_face(training), tmp_path)  # compares the ids of PROBES
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "the other, Größe 漢字<|endoftext|>"
    assert loaded.encode(text, add_special_tokens=False) == training.encode(text)
    assert loaded.decode(training.encode(text)) == text and loaded.eos_token_id == training.eos_id == 258


def test_a_conversion_that_gives_other_ids_is_refused(monkeypatch):
    monkeypatch.setattr(tokenizers, "generate_merges", lambda vocabulary, scores: [])
    with pytest.raises(UserError, match="encodes .* differently"):
        tokenizers.to_hugging_face(TRAINING)

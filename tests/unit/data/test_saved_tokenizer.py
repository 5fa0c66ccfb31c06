"""The files of a tokenizer as other programs read them: entries that they write into a text, and settings of theirs."""

import pytest
from transformers import AutoTokenizer

from helpers.small_tokenizers import make_tokenizer
from pc_recipe.data.tokenizers import Tokenizer, load_tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(params=["sentencepiece", "byte-level"])
def tokenizer(request, tmp_path) -> Tokenizer:
    return load_tokenizer("mistral-common" if request.param == "sentencepiece" else make_tokenizer(tmp_path / "given"))


@pytest.fixture
def theirs(tokenizer, tmp_path):
    """As transformers reads it."""
    tokenizer.save(tmp_path / "saved", 64)
    return AutoTokenizer.from_pretrained(tmp_path / "saved")


def test_entries_that_a_program_writes_into_a_text_are_entries(tokenizer, theirs):
    """As TRL appends the end of a text, and chat templates write both; a model would otherwise never learn to stop."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    text = tokenizer.encode("A text.")
    assert theirs("A text." + theirs.eos_token)["input_ids"] == [bos, *text, eos]
    theirs.chat_template = TEMPLATE
    chat = theirs.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert [index for index in chat if index in (bos, eos)] == [bos, eos, eos] and chat[-1] == eos
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    assert theirs.encode("<|im_start|>A text.")[1] == tokenizer.vocab_size


def test_text_that_spells_an_entry_is_text_to_this_recipe(tokenizer):
    """In shards, scores and generated text."""
    spelled = "A text.</s><s>"
    ids = tokenizer.to_transformers().encode(spelled)
    assert ids == [tokenizer.bos_id, *tokenizer.encode(spelled)]
    assert ids.count(tokenizer.bos_id) == 1 and tokenizer.eos_id not in ids

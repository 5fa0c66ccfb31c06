"""The files of a tokenizer as other programs read them: entries that they write into a text, and settings of theirs."""

import json

import pytest
from transformers import AutoTokenizer

from helpers.small_tokenizers import make_sentencepiece, make_tokenizer
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


@pytest.mark.parametrize("in_front", [True, False])
@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_the_settings_say_whether_a_space_is_put_in_front(kind, in_front, tmp_path):
    """transformers 4 changes a byte-level tokenizer.json to what they say, and takes silence for no; llama.cpp takes it for
    yes with a SentencePiece model."""
    if kind == "byte-level":
        folder = given = make_tokenizer(tmp_path / "given")
        state = json.loads((folder / "tokenizer.json").read_text())
        state["pre_tokenizer"]["add_prefix_space"] = in_front
        (folder / "tokenizer.json").write_text(json.dumps(state))
    else:
        given = make_sentencepiece(tmp_path / "given.model", add_dummy_prefix=in_front)
    load_tokenizer(given).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["add_prefix_space"] is in_front


def test_a_sentencepiece_model_stays_beside_the_tokenizer_made_from_it(tmp_path):
    """llama.cpp's converter takes its scores from there; without them it merges in another order."""
    given = make_sentencepiece(tmp_path / "given.model")
    load_tokenizer(given).save(tmp_path / "data")
    file = tmp_path / "data" / "tokenizer.json"
    load_tokenizer(tmp_path / "data").save(tmp_path / "export")
    assert (tmp_path / "export" / "tokenizer.model").read_bytes() == given.read_bytes()
    file.write_text(json.dumps(json.loads(file.read_text()), indent=2))  # written in another way
    load_tokenizer(tmp_path / "data").save(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == given.read_bytes()


@pytest.mark.parametrize("beside", ["that gives other ids", "of another type", "damaged"])
def test_a_sentencepiece_model_of_another_tokenizer_is_not_kept(beside, tmp_path):
    """As in Llama 2's folders, whose two forms differ in runs of spaces."""
    load_tokenizer(make_sentencepiece(tmp_path / "given.model")).save(tmp_path / "data")
    file = tmp_path / "data" / "tokenizer.model"
    if beside == "damaged":
        file.write_bytes(b"not a model")
    else:
        options = {"model_type": "unigram"} if beside == "of another type" else {"add_dummy_prefix": False}
        make_sentencepiece(file, **options)
    load_tokenizer(tmp_path / "data").save(tmp_path / "export")
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_text_that_spells_an_entry_is_text_to_this_recipe(tokenizer):
    """In shards, scores and generated text."""
    spelled = "A text.</s><s>"
    ids = tokenizer.to_transformers().encode(spelled)
    assert ids == [tokenizer.bos_id, *tokenizer.encode(spelled)]
    assert ids.count(tokenizer.bos_id) == 1 and tokenizer.eos_id not in ids

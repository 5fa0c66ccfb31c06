"""The optional encoder: the same bytes, and what happens when it gives other ids. A stand-in is wrong where a text says so."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer

from helpers.small_tokenizers import make_tokenizer
from pc.errors import UserError
from pc_recipe.data import fast_encoding
from pc_recipe.data.tokenizing import tokenize


class StandIn:
    encoded: list[str] = []

    def __init__(self, content: str):
        self._model = Tokenizer.from_str(content)
        self._model.encode_special_tokens = True

    from_json_str = classmethod(lambda cls, content: cls(content))

    def encode_batch_flat(self, texts: list[str], split_special_tokens: bool) -> tuple[bytes, bytes]:
        assert split_special_tokens
        if any("FAILS" in text for text in texts):
            raise ValueError("no such text")
        StandIn.encoded += texts
        ids = [self._model.encode(text.replace("WRONG", "wrong"), add_special_tokens=False).ids for text in texts]
        ends = np.cumsum([0, *map(len, ids)], dtype=np.uint64)
        return np.concatenate([np.array(one, np.uint32) for one in ids]).tobytes(), ends.tobytes()


@pytest.fixture
def fast(tmp_path, monkeypatch, write_parquet):
    """fast(texts of each file): runs with and without the encoder; returns the texts that it encoded, and why it stopped."""
    module = ModuleType("fastokens")
    module.Tokenizer = StandIn
    monkeypatch.setitem(sys.modules, "fastokens", module)
    monkeypatch.setattr(StandIn, "encoded", [])
    tokenizer = str(make_tokenizer(tmp_path / "tokenizer"))

    def run(*files: list[str]) -> tuple[list[str], str | None]:
        names = [
            str(write_parquet(tmp_path / f"{number}.parquet", texts)) for number, texts in enumerate(files)
        ]  # units
        made = [
            tokenize(names, tmp_path / engine, tokenizer=tokenizer, validation_fraction=0, engine=engine)
            for engine in ("tokenizers", "fastokens")
        ]
        assert made[0].shards == made[1].shards  # with their checksums
        why = tmp_path / "fastokens" / "fastokens_differs.txt"
        return StandIn.encoded, why.read_text() if why.exists() else None

    return run


TEXTS = [f"text {i} </s> é漢" for i in range(100)]


def test_it_gives_the_same_bytes(fast):
    encoded, why = fast(TEXTS)
    assert why is None and [encoded.count(text) for text in TEXTS] == [2] * 100  # at the start, and in the unit
    assert "</s>" in encoded and any(len(text) > 1000 for text in encoded)  # the tokenizer's entries, alone and joined


@pytest.mark.parametrize("mark", ["WRONG", "FAILS"])
def test_a_difference_at_the_start(mark, fast, capsys):
    encoded, why = fast([*TEXTS, mark])
    assert encoded.count(TEXTS[0]) == 1 and mark in why
    assert f"{why.strip()}: tokenizers encodes this unit and the rest of the job" in capsys.readouterr().err


def test_a_difference_in_the_sample_of_a_unit(fast, monkeypatch):
    """The units before it were compared too."""
    monkeypatch.setattr(fast_encoding, "CHECKED", 0)
    encoded, why = fast(TEXTS[:20], ["in front", "WRONG", *TEXTS[20:]], ["last"])
    assert "'WRONG' differently" in why and encoded.count(TEXTS[1]) == 1 and not {TEXTS[-1], "last"} & {*encoded}


def test_an_encoder_that_is_missing_or_cannot_read_the_tokenizer(fast, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(StandIn, "from_json_str", lambda content: json.loads("not JSON"))
        with pytest.raises(
            UserError, match="--engine fastokens cannot read tokenizer .* \\(Expecting .*; leave it out$"
        ):
            fast(TEXTS)
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(UserError, match="--engine fastokens is not installed .*: pip install fastokens==[\\d.]+$"):
        tokenize("no/such/file", "out", engine="fastokens")


def test_the_library_itself(tmp_path):
    pytest.importorskip("fastokens")
    docs = Path(__file__).resolve().parents[3] / "docs"
    made = [
        tokenize(str(docs), tmp_path / name, engine=name, validation_fraction=0.3)
        for name in ("tokenizers", "fastokens")
    ]
    assert made[0].shards == made[1].shards and not (tmp_path / "fastokens" / "fastokens_differs.txt").exists()

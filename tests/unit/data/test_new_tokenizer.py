"""A newly trained tokenizer: small, lossless, reproducible, and usable by the tokenising command."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pc.data.tokenizers import load_tokenizer
from pc.data.train_tokenizer import train_tokenizer
from pc.errors import UserError

TEXTS = [
    "The river ran past the mill, and the mill ground corn. " * 20,
    "Größe, naïve, 東京: every byte has a token.",
    None,
]


@pytest.fixture
def source(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "text.parquet")
    return str(tmp_path / "text.parquet")


def test_same_text_same_tokenizer(source, tmp_path):
    """Two trainings give the same tokenizer, which is lossless and has BOS and EOS."""
    assert train_tokenizer(source, tmp_path / "a", 300, 1) == 300
    train_tokenizer(source, tmp_path / "b", 300, 1)
    one, other = (load_tokenizer(tmp_path / name) for name in "ab")
    assert one.sha256 == other.sha256
    assert (one.bos_id, one.eos_id, one.vocab_size) == (0, 1, 300)
    ids, _ = one.encode_batch([TEXTS[1]])
    assert one.decode(ids) == TEXTS[1]
    merged, _ = one.encode_batch(["the mill"])
    assert len(merged) < len("the mill")


@pytest.mark.parametrize(
    "change, named",
    [({"vocab_size": 100}, "--vocab-size"), ({"megabytes": 0}, "--megabytes"), ({"text_column": "body"}, "body")],
)
def test_mistakes(source, tmp_path, change, named):
    with pytest.raises(UserError, match=named):
        train_tokenizer(source, tmp_path / "a", **({"vocab_size": 300, "megabytes": 1} | change))

"""What a validation logs of its sums; `tests/end_to_end` tests the losses themselves."""

import math
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from helpers import tiny
from helpers.small_tokenizers import SIZE, make_tokenizer
from pc_recipe.config import load_config
from pc_recipe.files.run_log import BITS_PER_BYTE
from pc_recipe.train import validate


def _logged(folder, shards, vocab_size, monkeypatch):
    """What is logged where each token's loss is 1 nat, and the labels that were seen."""
    config = tiny.write_config(folder / "tiny.toml", shards, folder / "run")
    words = ["--data.validation_sequences=7", f"--model.vocab_size={vocab_size}", "--training.local_batch_size=2"]
    validator = validate.FixedValidator(load_config(config, words), 0, 1)
    seen, logged = [], {}

    def sum_losses(trainer, inputs, labels, more):
        seen.extend(labels[labels != IGNORE_INDEX].tolist())
        return (labels != IGNORE_INDEX).sum()

    monkeypatch.setattr(validate, "_sum_losses", sum_losses)
    trainer = SimpleNamespace(
        model_parts=[], device="cpu", step=1,
        parallel_dims=SimpleNamespace(get_optional_mesh=lambda name: None),
        post_dataloading_process=lambda inputs, labels: (inputs["input"], labels, {}, {}),
        metrics_processor=SimpleNamespace(log_validation=lambda loss, step, more: logged.update(more, loss=loss)),
    )  # fmt: skip
    validator.validate(trainer)
    return logged, torch.tensor(seen)


def test_bits_per_byte_are_of_the_bytes_that_the_labels_stand_for(tmp_path, monkeypatch):
    """The last batch is filled with ignored labels, and BOS and EOS stand for no byte."""
    shards = tiny.make_shards(tmp_path / "bytes", str(make_tokenizer(tmp_path / "tokenizer")))
    logged, labels = _logged(tmp_path, shards, SIZE, monkeypatch)
    count, in_text = len(labels), int((labels < 256).sum())
    assert count == 7 * 16 and 0 < in_text < count
    assert logged["loss"] == 1.0 and logged[BITS_PER_BYTE] == pytest.approx(count / in_text / math.log(2))


def test_no_bits_per_byte_where_the_bytes_of_tokens_are_not_known(tiny_shards, tmp_path, monkeypatch):
    logged, _ = _logged(tmp_path, tiny_shards, tiny.VOCAB_SIZE, monkeypatch)
    assert logged["loss"] == 1.0 and BITS_PER_BYTE not in logged

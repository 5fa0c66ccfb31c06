"""Odd values for every key are accepted, or refused in a line or two without a traceback."""

import time

import pytest

from helpers.tiny import ROOT
from pc.errors import UserError
from pc_recipe.config import Config, load_config
from pc_recipe.config.run_key import all_values
from pc_recipe.plan.check import check

DEBUG = ROOT / "train_configs" / "debug.toml"
KEYS = list(all_values(Config()))
ODD = (
    "", "0", "-1", "3", "0.5", "nan", "inf", "-inf", "1e30", "1" + "0" * 24, "true", "[]", "{ a = 1 }", "no/such\n\x00",
)  # fmt: skip


def require_plain_words(key: str, value: str) -> bool:
    """Whether the value is refused. Each finding must have one or two lines, and one must name the key or its section."""
    try:
        findings = check(load_config(DEBUG, [f"--{key}={value}"]), 1, needs_data=False).errors
    except UserError as error:
        findings = [str(error)]
    assert all(finding.count("\n") <= 1 for finding in findings), findings
    section, _, name = key.partition(".")
    assert not findings or any(name.rpartition(".")[2] in f or f"[{section}" in f for f in findings), findings
    return bool(findings)


def test_odd_values_of_every_key():
    outcomes = [require_plain_words(key, value) for key in KEYS for value in ODD]
    assert 0.4 * len(outcomes) < sum(outcomes) < 0.9 * len(outcomes)


@pytest.mark.parametrize(
    "setting",
    [
        f"model.dim={2**40}", "model.dim=999999984", "model.n_layers=10000000", "model.n_heads=1000000000",
        "model.n_kv_heads=1000000000", "model.ffn_dim=1000000000", "model.vocab_size=1000000000",
        "training.global_batch_size=1000000000", "training.local_batch_size=1000000000",
        "pc.power_iterations=1000000000", "parallelism.tensor_parallel_degree=1000000000",
        "parallelism.data_parallel_shard_degree=1000000000",
    ],
)  # fmt: skip
def test_what_would_never_end_is_refused_at_once(setting):
    begin = time.process_time()
    assert require_plain_words(*setting.split("="))
    assert time.process_time() - begin < 1


def test_every_number_has_a_range_and_is_finite():
    numbers = [key for key, value in all_values(Config()).items() if type(value) in (int, float) and key != "pc.level"]
    assert len(numbers) >= 40
    for key in numbers:
        for value in ("nan", "inf", "-inf", "-1e9", "1e12", "1" + "0" * 24):
            with pytest.raises(UserError, match=f"command line: {key} = "):
                load_config(DEBUG, [f"--{key}={value}"])

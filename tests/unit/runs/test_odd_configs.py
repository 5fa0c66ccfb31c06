"""Odd values for every key, and files that are no configs: a line or two each, no traceback."""

import itertools

import pytest

from helpers.tiny import ROOT
from pc.errors import UserError
from pc_recipe.config import Config, load_config
from pc_recipe.config.run_key import all_values
from pc_recipe.runs.check import check

DEBUG = ROOT / "train_configs" / "debug.toml"
KEYS = list(all_values(Config()))
ODD = (
    "", "0", "-1", "3", "0.5", "nan", "inf", "-inf", "1e30", "1" + "0" * 24, "true", "[]", "{ a = 1 }", "no/such\n\x00",
)  # fmt: skip


def said_of(key: str, value: str) -> list[str]:
    """What the checks say, a finding each."""
    try:
        return check(load_config(DEBUG, [f"--{key}={value}"]), 1, needs_data=False).errors
    except UserError as error:
        return [str(error)]


def require_plain_words(key: str, value: str) -> bool:
    """Whether the value is refused; if so each finding is one or two lines, and one names the key or its section."""
    findings = said_of(key, value)
    assert all(finding.count("\n") <= 1 for finding in findings), findings
    section, _, name = key.partition(".")
    assert not findings or any(name.rpartition(".")[2] in f or f"[{section}" in f for f in findings), findings
    return bool(findings)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_odd_values_of_every_key(every):
    """One for each key in turn, or all."""
    cases = [(key, value) for key in KEYS for value in ODD] if every else zip(KEYS, itertools.cycle(ODD), strict=False)
    outcomes = [require_plain_words(key, value) for key, value in cases]
    assert 0.4 * len(outcomes) < sum(outcomes) < 0.9 * len(outcomes)


def test_every_number_has_a_range_and_is_finite():
    numbers = [key for key, value in all_values(Config()).items() if type(value) in (int, float) and key != "pc.level"]
    assert len(numbers) >= 40
    for key in numbers:
        for value in ("nan", "inf", "-inf", "-1e9", "1e12", "1" + "0" * 24):
            with pytest.raises(UserError, match=f"command line: {key} = "):
                load_config(DEBUG, [f"--{key}={value}"])

"""Odd values for every key, and files that are no configs: a line or two each, no traceback."""

import time

import pytest

from helpers.odd_configs import ODD, keys, settings
from helpers.tiny import ROOT
from pc.errors import UserError
from pc.plan.dry_run import check
from pc.settings import Config, load_config
from pc.settings.identity import everything

DEBUG = ROOT / "train_configs" / "debug.toml"


def said_of(key: str, value: str) -> list[str]:
    """What the checks say, a finding each."""
    try:
        return check(DEBUG, [f"--{key}={value}"], 1, needs_data=False).errors
    except UserError as error:
        return [str(error)]


def require_plain_words(key: str, value: str) -> bool:
    """Whether the value is refused; if so each finding is one or two lines, and one names the key or its section."""
    findings = said_of(key, value)
    assert all(finding.count("\n") <= 1 for finding in findings), findings
    section, _, name = key.partition(".")
    assert not findings or any(name.rpartition(".")[2] in f or f"[{section}" in f for f in findings), findings
    return bool(findings)


@pytest.mark.soak
def test_every_key_with_every_odd_value():
    cases = settings()
    assert len(cases) > 1500
    start = time.monotonic()
    refused = sum(require_plain_words(key, value) for key, value in cases)
    print(f"{len(cases)} settings, {refused} refused, {time.monotonic() - start:.0f} s")
    assert 0.4 * len(cases) < refused < 0.9 * len(cases)


def test_an_odd_value_for_every_key():
    """Another one for each key in turn."""
    for number, key in enumerate(keys()):
        require_plain_words(key, ODD[number % len(ODD)])


def test_every_number_has_a_range_and_is_finite():
    numbers = [key for key, value in everything(Config()).items() if type(value) in (int, float) and key != "pc.level"]
    assert len(numbers) >= 49
    for key in numbers:
        for value in ("nan", "inf", "-inf", "-1e9", "1e12", "1" + "0" * 24):
            with pytest.raises(UserError, match=f"command line: {key} = "):
                load_config(DEBUG, [f"--{key}={value}"])


FILES = {
    "syntax": b"[training\nsteps = 1",
    "encoding": "[job]\ndescription = 'é'".encode("latin-1"),
    "utf-16": "[job]".encode("utf-16"),
    "binary": bytes(range(256)),
    "nesting": b"x = " + b"[" * 10_000,
    "parent is itself": b'parent = "it.toml"',
    "parent is a folder": b'parent = "."',
    "parent with a NUL": b'parent = "a\\u0000b"',
}


@pytest.mark.parametrize("kind", FILES)
def test_files_that_are_no_configs(tmp_path, kind):
    file = tmp_path / "it.toml"
    file.write_bytes(FILES[kind])
    with pytest.raises(UserError) as raised:
        check(file, [], 1)
    assert str(file) in str(raised.value) and str(raised.value).count("\n") <= 1
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "words",
    [["--"], ["--=1"], ["--training"], ["--training.steps", "--x"], ["--.", "1"], ["--training..steps=1"], ["--a.b.c.d=1"],
     ["-1"], [""]],
    ids=str,
)  # fmt: skip
def test_command_lines(words):
    with pytest.raises(UserError, match="command line"):
        check(DEBUG, words, 1)

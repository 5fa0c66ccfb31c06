"""Odd settings for every key of the config: typing mistakes, and worse."""

from pc.settings import Config
from pc.settings.identity import everything

ODD = (
    "", "0", "-1", "3", "0.5", "nan", "inf", "-inf", "1e30", "1" + "0" * 24, "true", "[]", "{ a = 1 }", "no/such\n\x00",
)  # fmt: skip


def keys() -> list[str]:
    """Every `section.key`, and `section.subsection.key`."""
    return list(everything(Config()))


def settings() -> list[tuple[str, str]]:
    """Every key with every odd value."""
    return [(key, value) for key in keys() for value in ODD]

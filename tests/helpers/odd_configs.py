"""Odd settings for every key of the config: typing mistakes, and worse."""

import dataclasses
import typing
from collections.abc import Iterator

from pc.titan.config import JobConfig

ODD = (
    "", "0", "-1", "3", "0.5", "nan", "inf", "-inf", "1e30", "1" + "0" * 24, "true", "[]", "{ a = 1 }", "no/such\n\x00",
)  # fmt: skip


def keys(section: type = JobConfig, prefix: str = "") -> Iterator[str]:
    """Every `section.key`, and `section.subsection.key`."""
    for name, annotation in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(annotation):
            yield from keys(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def settings() -> list[tuple[str, str]]:
    """Every key with every odd value."""
    return [(key, value) for key in keys() for value in ODD]

"""What commands print. Text from elsewhere, such as a file name, is shown but cannot control the terminal."""

import re
import sys
from typing import Any, TextIO

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|(?<!^)\r(?!\n)")
"""Control characters, such as ESC; those that change the direction of text; lone surrogates, which cannot be encoded.
Newlines and tabs stay, and a carriage return at the beginning, as progress bars write it: a later one would hide the text
before it."""


def plain(text: str) -> str:
    r"""`text` with each character that controls a terminal replaced by its Python escape, such as \x1b."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Plain:
    """A stream that writes plain text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(plain(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def print_plainly() -> None:
    """Make this process write plain text to stdout and stderr from now on. The processes that it starts do not change."""
    # argparse, warnings, libraries and tracebacks print too, so the streams are replaced, not each call of `print`.
    sys.stdout, sys.stderr = _Plain(sys.stdout), _Plain(sys.stderr)  # type: ignore[assignment]

"""How commands print, and how they end: a mistake is one or two lines without a traceback. Text from elsewhere, such as a
file name, is shown but cannot control the terminal."""

import errno
import functools
import os
import re
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from pc.errors import UserError

DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""A failing disk or server, a full disk, an exhausted quota, a limit on file size, a file system that became read-only.
Unlike a user's mistake, they may pass."""

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


def describe_end(error: UserError) -> tuple[str, int]:
    """How the printed line of an error begins, and the exit status of the command."""
    return ("failed", 1) if error.may_pass else ("error", 2)


def _reader_left() -> bool:
    """Whether nobody reads the output any more."""
    watched = select.poll()
    watched.register(sys.stdout, 0)  # asks for no event, so that it reports only errors and hang-ups
    return bool(watched.poll(0))


def exit_on_user_error(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command's `main`: a `UserError` prints `error: ...` on stderr and exits with status 2.

    An `OSError` about a file or folder, such as a missing one, is reported likewise; if the disk failed, the line begins
    with `failed: ` and the status is 1. A reader of the output who leaves early, such as `head`, ends the command
    in silence, and so does Ctrl-C. Any other exception is a bug in this project and keeps its traceback. All that the
    command prints is plain text.
    """

    @functools.wraps(main)
    def guarded(*args, **kwargs) -> None:
        print_plainly()
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            if not _reader_left():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its exit
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)
        except UserError as error:
            kind, status = describe_end(error)
            print(f"{kind}: {error}", file=sys.stderr)
            sys.exit(status)
        except OSError as error:
            kind, status = ("failed", 1) if error.errno in DISK_ERRORS else ("error", 2)
            # without a name: a write to a full disk, and Python's search for a folder of temporary files
            if error.filename is None and kind == "error" and not isinstance(error, FileNotFoundError):
                raise
            named = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
            print(f"{kind}: {'' if named is None else f'{named}: '}{error.strerror}", file=sys.stderr)
            sys.exit(status)

    return guarded

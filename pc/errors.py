"""Errors that the user can fix, and what commands say of them: one or two lines, without a traceback."""

import errno
import functools
import os
import select
import sys
from collections.abc import Callable

from pc.terminal import print_plainly

DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""A failing disk or server, a full disk, an exhausted quota, a limit on file size, a file system that became read-only.
Unlike a user's mistake, they may pass."""


class UserError(ValueError):
    """The message is one or two lines that name the key or file and say what would be valid."""

    kind, status = "error", 2
    """How the printed line begins, and the exit status of the command."""


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
            print(f"{error.kind}: {error}", file=sys.stderr)
            sys.exit(error.status)
        except OSError as error:
            kind, status = ("failed", 1) if error.errno in DISK_ERRORS else ("error", 2)
            # without a name: a write to a full disk, and Python's search for a folder of temporary files
            if error.filename is None and kind == "error" and not isinstance(error, FileNotFoundError):
                raise
            named = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
            print(f"{kind}: {'' if named is None else f'{named}: '}{error.strerror}", file=sys.stderr)
            sys.exit(status)

    return guarded

"""A fault of the disk is a line, also without a name; other errors are bugs."""

import errno
import os

import pytest

from pc.errors import exit_on_user_error


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (OSError(errno.ENOSPC, "full", "a"), "failed: a: full", 1),
        (OSError(errno.EFBIG, "too large"), "failed: too large", 1),
        (OSError(errno.EROFS, "read-only", b"a"), "failed: a: read-only", 1),
        (OSError(errno.ENOENT, "missing", "a"), "error: a: missing", 2),
        (OSError(errno.ENOENT, "No usable temporary directory"), "error: No usable temporary directory", 2),
    ],
)
def test_a_line(error, line, status, capsys):
    @exit_on_user_error
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        main()
    assert (capsys.readouterr().err, end.value.code) == (f"{line}\n", status)


def test_a_bug_keeps_its_traceback():
    @exit_on_user_error
    def main():
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    with pytest.raises(OSError, match="Bad file"):
        main()

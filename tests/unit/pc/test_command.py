"""Control characters in text from others show as text, wherever a command prints it. A fault of the disk is a line, also
without a name; other errors are bugs."""

import errno
import os
import subprocess
import sys

import pytest

from pc.command import exit_on_user_error, plain

TITLE = "\x1b]0;mine\x07"
SHOWN = r"\x1b]0;mine\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a{TITLE}b", f"a{SHOWN}b"),
        ("\x9b2J", r"\x9b2J"),  # an escape sequence of one character
        ("\x08\x7f\x00", r"\x08\x7f\x00"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("\udcff.txt", r"\udcff.txt"),  # a name that is not UTF-8
        ("mine\rnot mine", r"mine\rnot mine"),
        ("\r 50%|\u2588 |\tone\n", "\r 50%|\u2588 |\tone\n"),
        ("Grüße, 漢字, \u0645\u06cc\u200c\u062e, 👩\u200d🔬", "Grüße, 漢字, \u0645\u06cc\u200c\u062e, 👩\u200d🔬"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert plain(text) == plain(shown) == shown


PRINTS = {
    "print": "print(T)",
    "error": "raise UserError(T)",
    "a named file": "open('/nowhere/' + T)",
    "a bug": "raise RuntimeError(T)",
    "exit": "sys.exit(T)",
    "warning": "warnings.warn(T)",
    "logging": "logging.warning(T)",
    "a handler of before": "logging.getLogger('pc').addHandler(logging.StreamHandler()); logging.getLogger('pc').error(T)",
    "argparse": "argparse.ArgumentParser(prog=T).parse_args([T])",
    "a bar": "list(tqdm.tqdm([1], desc=T))",
    "a thread": "one = threading.Thread(target=lambda: 1 / 0, name=T); one.start(); one.join()",
}


@pytest.mark.parametrize("how", PRINTS)
def test_all_that_a_command_prints(how):
    program = (
        "import argparse, logging, sys, threading, tqdm, warnings\n"
        "from pc.command import exit_on_user_error\nfrom pc.errors import UserError\n"
        f"T = {TITLE!r}\n@exit_on_user_error\ndef main():\n    {PRINTS[how]}\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert SHOWN in done.stdout + done.stderr
    assert not {"\x1b", "\x07"} & {*done.stdout, *done.stderr}


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

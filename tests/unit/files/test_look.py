""" "Nothing there" and "could not look" are different answers, and all modules ask through `look`."""

import errno
import os
import re

import pytest

from helpers.tiny import ROOT
from pc.errors import UserError
from pc_recipe.files import look
from pc_recipe.files.errors import ReadFailed

ASKED = {  # function, its answer if there is nothing, its system call
    "is_there": (look.is_there, False, "stat"),
    "is_file": (look.is_file, False, "stat"),
    "is_folder": (look.is_folder, False, "stat"),
    "names": (look.names, [], "scandir"),
    "files_below": (look.files_below, [], "scandir"),
}


def refuse(monkeypatch, call, number, times):
    """Make the next `times` calls of a function of `os` fail; returns a list with an item for each that is left."""
    real, left = getattr(os, call), [number] * times

    def refused(path, *arguments, **options):
        if left:
            raise OSError(left.pop(), "made by the test", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, call, refused)
    return left


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ASKED)
def test_a_failed_look_does_not_mean_nothing_there(tmp_path, monkeypatch, name, number):
    ask, nothing, call = ASKED[name]
    assert ask(tmp_path / "none") == nothing
    monkeypatch.setattr(look, "PAUSES", (0.0, 0.0))
    refuse(monkeypatch, call, number, times=3)
    with pytest.raises(ReadFailed, match=re.escape(f"{tmp_path}: could not be read (")) as raised:
        ask(tmp_path)
    assert raised.value.may_pass


def test_an_error_that_passes_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(look, "PAUSES", (0.0, 0.0))
    (tmp_path / "file").write_text("text")
    for call in ("stat", "scandir"):
        left = refuse(monkeypatch, call, errno.EIO, times=2)
        assert look.is_file(tmp_path / "file") and look.names(tmp_path) == ["file"]
        assert not left


def test_a_subfolder_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("b"):
            raise PermissionError(errno.EACCES, "made by the test", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ReadFailed, match="a/b: could not be read"):
        look.files_below(tmp_path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_only_a_file_is_read(tmp_path, make):
    make(tmp_path / "it")
    with pytest.raises(UserError, match="it should be a file$"):
        look.read(tmp_path / "it")
    assert look.read(tmp_path / "none") is None


ELSEWHERE = {
    "data/wheel.py": "in a folder that it has just made",
    "evaluate/hugging_face.py": "in a folder that it has just made",
    "files/inside.py": "of what a listing has just named",
    "train/cpu.py": "a device",
}
ASKS = re.compile(
    r"(?<!look)\.(exists|is_file|is_dir|iterdir|glob|rglob)\(|os\.path\.(exists|isfile|isdir)|os\.(listdir|scandir)"
)


def test_no_other_module_asks_the_file_system():
    """Python's own functions answer "nothing" to some errors of the file system, and from 3.14 on to all."""
    rooms = ROOT / "pc_recipe", ROOT / "scripts"
    found = {str(f.relative_to(room)) for room in rooms for f in room.rglob("*.py") if ASKS.search(f.read_text())}
    assert found == {"files/look.py", *ELSEWHERE}

"""Records of any kind are read in one way: what they hold, nothing, or a line that names the file."""

import pytest

from pc.errors import UserError
from pc_recipe.files import record
from pc_recipe.files.record import Malformed, Tables


@pytest.mark.parametrize(
    ("name", "content", "form", "holds"),
    [
        ("a.json", '{"a": 1}', dict[str, int], {"a": 1}),
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}', dict[str, int], [{"a": 1}, {"a": 2}]),
        ("a.toml", "[a]\nb = 1\n", Tables, {"a": {"b": 1}}),
        ("a.toml", "", Tables, {}),
    ],
)
def test_what_it_holds(tmp_path, name, content, form, holds):
    (tmp_path / name).write_text(content)
    assert record.read(tmp_path / name, form) == holds


ODD = {
    "a.json": [b"", b"{", b"[]", b"null", b"5", b"\0" * 40, b'{"a": "x"}', b'{"a": 5.5}', b"\xff", b"[" * 10**5,
               b'{"a": ' + b"9" * 5000 + b"}"],
    "a.jsonl": [b"[]\n", b"5", b"null\n", b'{"a": 1}\n{"a"', b"\xff\n"],
    "a.toml": [b"a = 1", b"[a", b"\xff", b"a = " + b"[" * 10**4, b"a.b = " + b"9" * 5000, b"a.a = 1\r"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, content) for name in ODD for content in ODD[name]])
def test_a_record_of_another_form_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Malformed) as raised:
        record.read(tmp_path / name, Tables if name == "a.toml" else dict[str, int])
    said = str(raised.value)
    assert said.startswith(f"{tmp_path / name}: damaged, or of another form (")
    assert "\n" not in said and len(said) < len(str(tmp_path)) + 300


def test_no_record(tmp_path):
    assert record.read(tmp_path / "a.json", dict) is None
    (tmp_path / "a.json").mkdir()
    with pytest.raises(UserError, match="should be a file"):
        record.read(tmp_path / "a.json", dict)

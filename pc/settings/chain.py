"""Reads a chain of TOML files: `parent = "base.toml"` at the top of a file names the file that it overrides.

Precedence: command line > the file > its parent > the parent's parent > the schema's defaults. Sections merge key by
key; a value replaces its parent's. Lists and tables such as `pc.level` are values.
"""

import contextlib
import difflib
import hashlib
import os
import re
import reprlib
import tomllib
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import TypeAdapter, ValidationError

from pc.common.files import write_atomically
from pc.errors import UserError
from pc.settings.schema import INSTEAD, Config
from pc.settings.sections import Section, keys_of

PARENT = "parent"
RESOLVED = "# Resolved configuration. Sources, highest precedence first:\n"
Schema = TypeVar("Schema", bound=Section)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, with `job.dump_folder` filled in: outputs/<name of the file> if nothing sets it.

    Args:
        path: the TOML file of the run.
        overrides: words of a command line, `--section.key value` or `--section.key=value`.

    Raises:
        UserError: a line for each key of the first faulty file, or of the command line.
    """
    config = resolve(path, overrides, Config)
    config.job.dump_folder = config.job.dump_folder or str(Path("outputs") / Path(path).stem)
    config._origin = _origin(Path(path), overrides)
    return config


def load_record(path: str | Path) -> Config:
    """The configuration that a run wrote, perhaps by another version: keys that do not exist here are left out."""
    ((_, _, values),) = _chain(Path(path))
    return validated(values, Config, str(path), extra="ignore")


def write_config(config: Config, destination: str | Path) -> None:
    """Write what is set as one TOML that resolves to `config`, with its origin in comments."""
    write_atomically(destination, f"{config.origin}\n{tomli_w.dumps(config.model_dump(exclude_unset=True))}")


def resolve(path: str | Path, overrides: Sequence[str], schema: type[Schema]) -> Schema:
    """An instance of any schema from a file, its ancestors and `overrides`; `model_fields_set` says what was set."""
    merged: dict[str, Any] = {}
    read = []
    for file, _, values in _chain(Path(path)):  # the file itself first: its mistakes are reported first
        validated(values, schema, str(file))
        read.append(values)
    for values in [*reversed(read), parse_overrides(overrides, schema)]:
        _merge(merged, values, schema)
    return validated(merged, schema, str(path))


def validated(values: dict[str, Any], schema: type[Schema], where: str, extra: str = "forbid") -> Schema:
    """Raises a `UserError` with a line for each wrong key; `extra="ignore"` leaves out keys of another version."""
    try:
        return schema.model_validate(values, extra=extra)
    except ValidationError as error:
        raise UserError("\nerror: ".join(f"{where}: {line}" for line in _lines(error, values, schema))) from None


def parse_overrides(words: Sequence[str], schema: type[Section]) -> dict[str, Any]:
    """Words of a command line as {section: {key: value}}.

    Accepts `--a.b value`, `--a.b=value`, and `--a.b` alone for true. Lists are written `x,y` or as TOML, tables as TOML
    (`'{o = 4, ffn = 2}'`).
    """
    parsed: dict[str, Any] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise UserError(f"command line: {word!r} is not an override; write --section.key value")
        name, has_value, text = word[2:].partition("=")
        keys = name.replace("-", "_").split(".")
        value: Any = True
        if has_value or (words and not words[0].startswith("--")):
            value = _value(text if has_value else words.pop(0), _annotation(keys, schema))
        for key in reversed(keys):
            value = {key: value}
        _merge(parsed, value, schema)
    validated(parsed, schema, "command line")
    return parsed


def _chain(path: Path) -> Iterator[tuple[Path, bytes, dict[str, Any]]]:
    """(file, content, values) of a file and its ancestors."""
    seen: list[str] = []
    child = ""
    while True:
        seen.append(os.path.abspath(path))
        if seen.count(seen[-1]) > 1:
            raise UserError(f"{path}{child}: parents form a cycle: {' -> '.join(map(os.path.basename, seen))}")
        try:
            content = path.read_bytes()
            values = tomllib.loads(content.decode())
        except (OSError, ValueError, RecursionError) as error:  # wrong syntax, encoding, too many digits or levels
            reason = getattr(error, "strerror", None) or f"not valid TOML: {error}"
            raise UserError(f"{path}{child}: {reason}") from None
        parent = values.pop(PARENT, None)
        yield path, content, values
        if parent is None:
            return
        child, path = f" (parent of {path})", path.parent / str(parent)


def _merge(below: dict[str, Any], above: dict[str, Any], schema: type[Section]) -> None:
    for key, value in above.items():
        inner = _annotation([key], schema)
        if _is_section(inner) and isinstance(value, dict) and isinstance(below.setdefault(key, {}), dict):
            _merge(below[key], value, inner)
        else:
            below[key] = value


def _origin(path: Path, overrides: Sequence[str]) -> str:
    """Comments for `write_config`; a file that it wrote keeps its own."""
    files = list(_chain(path))
    text = files[0][1].decode()
    if text.startswith(RESOLVED) and not overrides:
        return re.match(r"(#.*\n)*", text)[0]
    # a line break in a word would end the comment
    words = " ".join(overrides).replace("\n", " ").replace("\r", " ")
    lines = [f"#   command line: {words}\n"] if overrides else []
    return RESOLVED + "".join(lines + [f"#   {f}  sha256 {hashlib.sha256(text).hexdigest()}\n" for f, text, _ in files])


# --- names and what is said about values ------------------------------------------------------------


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _annotation(keys: Sequence[str], schema: type[Section]) -> Any:
    """The type of a key; None if there is no such key."""
    annotation: Any = schema
    for key in keys:
        field = annotation.model_fields.get(key) if _is_section(annotation) else None
        annotation = field and field.annotation
    return annotation


def _unknown(name: str, schema: type[Section]) -> str:
    if name in INSTEAD:
        return f"{name} is not supported by this trainer; see {INSTEAD[name]}"
    known = [key for key, *_ in keys_of(schema())]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    names = [*known, *(key.rpartition(".")[0] for key in known)]
    candidates = elsewhere or difflib.get_close_matches(name, names, n=1) or ["one that --help shows"]
    return f"unknown key {name}; did you mean {' or '.join(candidates[:3])}?"


def _lines(error: ValidationError, values: dict[str, Any], schema: type[Section]) -> list[str]:
    """One line for each faulty key: the branches of a union are one finding."""
    found: dict[str, list[str]] = {}
    for finding in error.errors(include_url=False):
        value: Any = values
        keys: list[str] = []
        for part in finding["loc"]:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):  # the branch of a union, or a key that is missing
                break
            keys.append(str(part))
        name, branch, said = ".".join(keys), finding["loc"][len(keys) :], finding["msg"]
        if finding["type"] == "extra_forbidden" and not branch:
            found[_unknown(name, schema)] = []
            continue
        if finding["type"] in ("missing", "extra_forbidden"):
            said = ("not " if finding["type"] == "extra_forbidden" else "") + f"have {branch[-1]}"
        said = re.sub(r"^(Input|String|List|Value error,) should | or instance of .*", "", said)
        found.setdefault(f"{name} = {reprlib.repr(value)} should ", []).append(said)
    return [begin + " or ".join(dict.fromkeys(said)).replace(" or be ", " or ") for begin, said in found.items()]


def _value(text: str, annotation: Any) -> Any:
    """The value of a command-line word: as TOML, as a list `x,y`, or as it stands, whichever the key takes first."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        tries = [value] if isinstance(value, list | dict) else [value, words]
    except (ValueError, RecursionError):
        value, tries = text, [words]
    if annotation is None or _is_section(annotation):
        return value
    for candidate in (*tries, text):
        with contextlib.suppress(ValidationError):
            return _adapter(annotation).validate_python(candidate, strict=candidate is value is not text)
    return tries[-1] if typing.get_origin(annotation) is list else value  # `validated` says what is wrong


@cache
def _adapter(annotation: Any) -> TypeAdapter:
    return TypeAdapter(annotation)

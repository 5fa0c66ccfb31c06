"""Reads a chain of TOML files: `parent = "base.toml"` at the top of a file names the file that it overrides.

Precedence: command line > the file > its parent > the parent's parent > the schema's defaults. Sections merge key by
key; a value replaces its parent's. Lists and tables such as `pc.level` are values.
"""

import difflib
import hashlib
import re
import reprlib
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from pc.common.files import write_atomically
from pc.errors import UserError
from pc.settings.schema import INSTEAD, Config
from pc.settings.sections import Section

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


def write_config(config: Config, destination: str | Path) -> None:
    """Write what is set as one TOML that resolves to `config`, with its origin in comments."""
    write_atomically(destination, f"{config.origin}\n{tomli_w.dumps(config.model_dump(exclude_unset=True))}")


def resolve(path: str | Path, overrides: Sequence[str], schema: type[Schema]) -> Schema:
    """An instance of any schema from a file, its ancestors and `overrides`; `model_fields_set` says what was set."""
    merged: dict[str, Any] = {}
    read = []
    for file, content in _chain(Path(path)):  # the file itself first: its mistakes are reported first
        values = {key: value for key, value in _parse(file, content).items() if key != PARENT}
        validated(values, schema, str(file))
        read.append(values)
    for values in [*reversed(read), parse_overrides(overrides, schema)]:
        _merge(merged, values, schema)
    return validated(merged, schema, str(path))


def validated(values: dict[str, Any], schema: type[Schema], where: str) -> Schema:
    """Raises a `UserError` with a line for each wrong key."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UserError("\nerror: ".join(f"{where}: {line}" for line in _lines(error, values, schema))) from None


def known(values: dict[str, Any], schema: type[Section]) -> dict[str, Any]:
    """Values of a file of another version, without the keys that `schema` does not have."""
    fields = {key: field.annotation for key, field in schema.model_fields.items()}
    return {
        key: known(value, fields[key]) if _is_section(fields[key]) and isinstance(value, dict) else value
        for key, value in values.items()
        if key in fields
    }


def parse_overrides(words: Sequence[str], schema: type[Section]) -> dict[str, Any]:
    """Words of a command line as {section: {key: value}}.

    Accepts `--a.b value`, `--a.b=value`, and `--a.b` alone for true. Lists are written `x,y` or as TOML, tables as TOML
    (`'{o = 4, ffn = 2}'`).
    """
    where, parsed, words = "command line", {}, list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{where}: {word!r} is not an override; write --section.key value")
        name, has_value, text = word[2:].partition("=")
        keys = name.replace("-", "_").split(".")
        annotation = _annotation(keys, schema)
        if annotation is None:
            raise UserError(f"{where}: {_unknown(keys, schema)}")
        if _is_section(annotation):
            raise UserError(f"{where}: --{name} is a section; write --{name}.key value")
        if not has_value:
            if words and not words[0].startswith("--"):
                text = words.pop(0)
            elif annotation is bool:
                text = "true"
            else:
                raise UserError(f"{where}: --{name} needs a value")
        section = parsed
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = _value(text, annotation)
    validated(parsed, schema, where)
    return parsed


def _chain(path: Path) -> Iterator[tuple[Path, bytes]]:
    seen: list[Path] = []
    child = None
    while path is not None:
        if path.resolve() in seen:
            names = " -> ".join(p.name for p in [*seen, path])
            raise UserError(f"{child}: its parents form a cycle: {names}")
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            where = f'{child}: parent = "{path}"' if child else str(path)
            reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", error)
            raise UserError(f"{where}: {reason}") from None
        yield path, content
        seen.append(path.resolve())
        parent = _parse(path, content).get(PARENT)
        if parent is not None and not (isinstance(parent, str) and "\0" not in parent):
            raise UserError(f"{path}: {PARENT} must be the name of a TOML file, not {parent!r}")
        child, path = path, path.parent / parent if parent is not None else None


def _parse(file: Path, content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # wrong syntax, wrong encoding, too many digits or levels
        raise UserError(f"{file}: not valid TOML: {error}") from None


def _merge(below: dict[str, Any], above: dict[str, Any], schema: type[Section]) -> None:
    for key, value in above.items():
        if _is_section(annotation := schema.model_fields[key].annotation):
            _merge(below.setdefault(key, {}), value, annotation)
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
    return RESOLVED + "".join(lines + [f"#   {f}  sha256 {hashlib.sha256(text).hexdigest()}\n" for f, text in files])


# --- names and what is said about values ------------------------------------------------------------


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _annotation(keys: Sequence[str], schema: type[Section]) -> Any:
    """The type of a key; None if there is no such key."""
    annotation: Any = schema
    for key in keys:
        field = annotation.model_fields.get(key) if _is_section(annotation) else None
        if field is None:
            return None
        annotation = field.annotation
    return annotation


def all_keys(schema: type[Section]) -> list[str]:
    """Every `section.key`."""
    keys = []
    for name, field in schema.model_fields.items():
        inner = all_keys(field.annotation) if _is_section(field.annotation) else None
        keys += [name] if inner is None else [f"{name}.{key}" for key in inner]
    return keys


def _unknown(keys: Sequence[str], schema: type[Section]) -> str:
    known = next(n for n in range(len(keys)) if _annotation(keys[: n + 1], schema) is None)
    name, known = ".".join(keys[: known + 1]), all_keys(schema)
    for key, instead in INSTEAD.items() if schema is Config else ():
        if key in (name, ".".join(keys)):
            return f"{key} is not supported by this trainer; " + (f"see {instead}" if instead else "remove it")
    names = [*known, *(key.rpartition(".")[0] for key in known)]
    section, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in names if key.rpartition(".")[0] == section}
    near = [siblings[key] for key in difflib.get_close_matches(leaf, siblings, n=1)]
    elsewhere = [key for key in known if key.rpartition(".")[2] == keys[-1]]
    candidates = near + elsewhere or difflib.get_close_matches(name, names, n=1) or ["one that --help shows"]
    return f"unknown key {name}; did you mean {' or '.join(candidates[:3])}?"


def _lines(error: ValidationError, values: dict[str, Any], schema: type[Section]) -> list[str]:
    """One line for each faulty key: the branches of a union are one finding."""
    found: dict[str, tuple[str, list[str]]] = {}
    for finding in error.errors(include_url=False):
        place, value, keys = finding["loc"], values, []
        while place and _annotation([*keys, str(place[0])], schema) is not None:
            keys.append(str(place[0]))
            value, place = value[place[0]], place[1:]
        name, kind, said = ".".join(keys), finding["type"], finding["msg"]
        if _is_section(_annotation(keys, schema)):
            wrong = f"{name} is a section; write [{name}], not {name} = {reprlib.repr(value)}"
            # only the first unknown key: a file of another kind would have a line for each of its sections
            said = _unknown([*keys, *map(str, place)], schema) if place else wrong
            found.setdefault("unknown" if place else name, (said, []))
            continue
        while (
            place
            and isinstance(value, dict | list)
            and place[0] in (value if isinstance(value, dict) else range(len(value)))
        ):
            name, value, place = f"{name}[{place[0]!r}]", value[place[0]], place[1:]  # an entry of a table or a list
        if kind in ("missing", "extra_forbidden"):
            said = f"Input should {'not ' if kind == 'extra_forbidden' else ''}have {place[-1]}"
        said = re.sub(r"^(Input|String|List|Value error,) should | or instance of .*", "", said)
        found.setdefault(name, (f"{name} = {reprlib.repr(value)} should ", []))[1].append(said)
    return [begin + " or ".join(dict.fromkeys(said)).replace(" or be ", " or ") for begin, said in found.values()]


def _value(text: str, annotation: Any) -> Any:
    """The value of a command-line word; `validated` checks its type."""
    kinds = dict(_kinds(annotation))
    if kinds.keys() <= {str}:
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, str) and list in kinds and ("," in text or len(kinds) == 1):
        return [_value(item.strip(), kinds[list]) for item in text.split(",") if item.strip()]
    if isinstance(value, str) and float in kinds:
        try:
            return float(text)  # TOML does not allow `.5` and `1.`
        except ValueError:
            pass
    return value


def _kinds(annotation: Any) -> Iterator[tuple[type, Any]]:
    """(type, type of the items of a list) of each branch of an annotation but None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for member in arguments:
            yield from _kinds(member)
    elif origin is typing.Annotated:
        yield from _kinds(arguments[0])
    elif origin is typing.Literal:
        yield type(arguments[0]), None
    elif annotation is not types.NoneType:
        yield origin or annotation, arguments[0] if origin is list else None

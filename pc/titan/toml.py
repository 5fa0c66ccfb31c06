"""Merges a chain of TOML files into one: `parent = "base.toml"` at the top of a file names the file that it overrides.

Precedence: command line > the file > its parent > the parent's parent > the dataclasses' defaults.
Sections merge key by key; a value replaces its parent's. Lists and tables such as `pc.level` are values.
Names and types are checked strictly here, because TorchTitan silently accepts `steps = 5.5`
or `lr = "fast"`. TorchTitan reads the single file that `write_resolved` writes.
"""

import dataclasses
import difflib
import hashlib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from pc.common.files import write_atomically
from pc.errors import UserError

PARENT = "parent"


def resolve(path: str | Path, overrides: Sequence[str], config_class: type) -> dict[str, Any]:
    """The values set by `path`, its ancestors and `overrides`, checked against `config_class`.

    Args:
        path: the TOML file of the run.
        overrides: command-line arguments, `--section.key value` or `--section.key=value`.
        config_class: dataclass whose fields are dataclasses, one per section (a JobConfig).

    Returns:
        {section: {key: value}} of the keys that are set, without the defaults of `config_class`.
    """
    resolved: dict[str, Any] = {}
    checked = []
    for file, content in _read_bytes_of_chain(Path(path)):  # the file itself first: its mistakes are reported first
        values = _parse_toml(file, content)
        values.pop(PARENT, None)
        checked.append(_checked_section(values, config_class, (), config_class, str(file)))
    for values in reversed(checked):
        _merge(resolved, values, config_class)
    _merge(resolved, parse_overrides(overrides, config_class), config_class)
    return resolved


def require_typed(values: dict[str, Any], config_class: type, where: str) -> None:
    """Raise a `UserError` for sections and keys that `config_class` does not have, and for values of a wrong type."""
    _checked_section(values, config_class, (), config_class, where)


def write_resolved(
    path: str | Path, overrides: Sequence[str], config_class: type, destination: str | Path
) -> dict[str, Any]:
    """Resolve, write the result as one TOML to `destination`, and return it.

    Comments at its top list the overrides, and the source files with their SHA-256.
    """
    resolved = resolve(path, overrides, config_class)
    header = ["# Resolved configuration, written by the trainer. Sources, highest precedence first:"]
    if overrides:
        # a line break in a value would end the comment
        header.append("#   command line: " + " ".join(overrides).replace("\n", " ").replace("\r", " "))
    for file, content in _read_bytes_of_chain(Path(path)):
        header.append(f"#   {file}  sha256 {hashlib.sha256(content).hexdigest()}")
    write_atomically(destination, "\n".join(header) + "\n\n" + tomli_w.dumps(resolved))
    return resolved


def to_config(resolved: dict[str, Any], config_class: type) -> Any:
    """An instance of the dataclass with the `resolved` values, and defaults for the rest."""
    annotations = typing.get_type_hints(config_class)
    values = {
        key: to_config(value, annotations[key]) if dataclasses.is_dataclass(annotations[key]) else value
        for key, value in resolved.items()
    }
    try:
        return config_class(**values)
    except (ValueError, AssertionError) as error:  # TorchTitan's sections check some values themselves
        raise UserError(f"[{config_class.__name__.lower()}]: {error}") from None


def dump_folder(path: str | Path, resolved: dict[str, Any]) -> Path:
    """Where the run writes: `job.dump_folder`, or outputs/<name of the config> if that is not set."""
    return Path(resolved.get("job", {}).get("dump_folder") or Path("outputs") / Path(path).stem)


def parse_overrides(overrides: Sequence[str], config_class: type) -> dict[str, Any]:
    """Command-line arguments as {section: {key: value}}, with the types of the fields of `config_class`.

    Accepts `--a.b value`, `--a.b=value`, and `--a.b` alone for true. Lists
    are written `x,y` or as TOML, tables as TOML (`'{o = 4, ffn = 2}'`).
    """
    where = "command line"
    parsed: dict[str, Any] = {}
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{where}: {word!r} is not an override; write --section.key value")
        name, has_value, text = word[2:].partition("=")
        keys = name.replace("-", "_").split(".")
        annotation = _annotation_of(keys, config_class, where)
        if dataclasses.is_dataclass(annotation):
            raise UserError(f"{where}: --{name} is a section; write --{name}.key value")
        if not has_value:
            if words and not words[0].startswith("--"):
                text = words.pop(0)
            elif annotation is bool:
                text = "true"
            else:
                raise UserError(f"{where}: --{name} needs a value")
        value = _checked(_parse_text(text, annotation), annotation, ".".join(keys), where)
        section = parsed
        for key in keys[:-1]:
            section = section.setdefault(key, {})
        section[keys[-1]] = value
    return parsed


def _read_bytes_of_chain(path: Path) -> Iterator[tuple[Path, bytes]]:
    seen: list[Path] = []
    child = None
    while path is not None:
        if path.resolve() in seen:
            names = " -> ".join(p.name for p in [*seen, path])
            raise UserError(f"{child}: its parents form a cycle: {names}")
        try:
            content = path.read_bytes()
        except OSError as error:
            where = f'{child}: parent = "{path}"' if child else str(path)
            reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
            raise UserError(f"{where}: {reason}") from None
        yield path, content
        seen.append(path.resolve())
        parent = _parse_toml(path, content).get(PARENT)
        if parent is not None and not (isinstance(parent, str) and "\0" not in parent):
            raise UserError(f"{path}: {PARENT} must be the name of a TOML file, not {parent!r}")
        child, path = path, path.parent / parent if parent is not None else None


def _parse_toml(file: Path, content: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # wrong syntax, wrong encoding, too many digits or levels
        raise UserError(f"{file}: not valid TOML: {error}") from None


def _merge(below: dict[str, Any], above: dict[str, Any], config_class: type) -> None:
    """Override values of `below` by those of `above`, in place. Sections of `config_class` are merged key by key."""
    annotations = typing.get_type_hints(config_class)
    for key, value in above.items():
        if dataclasses.is_dataclass(annotations[key]):
            _merge(below.setdefault(key, {}), value, annotations[key])
        else:
            below[key] = value


# --- names ------------------------------------------------------------------------------------------


def _annotation_of(keys: Sequence[str], config_class: type, where: str) -> Any:
    annotation: Any = config_class
    for depth, key in enumerate(keys):
        known = typing.get_type_hints(annotation) if dataclasses.is_dataclass(annotation) else {}
        if key not in known:
            raise _unknown_key(keys[: depth + 1], list(known), config_class, where)
        annotation = known[key]
    return annotation


def _unknown_key(keys: Sequence[str], siblings: list[str], config_class: type, where: str) -> UserError:
    name = ".".join(keys)
    near = [".".join([*keys[:-1], key]) for key in difflib.get_close_matches(keys[-1], siblings, n=1)]
    elsewhere = [key for key in _all_keys(config_class) if key.rpartition(".")[2] == keys[-1]]
    candidates = near + elsewhere or difflib.get_close_matches(name, _all_keys(config_class), n=1)
    hint = f"; did you mean {' or '.join(candidates[:3])}?" if candidates else f"; known here: {', '.join(siblings)}"
    return UserError(f"{where}: unknown key {name}{hint}")


def _all_keys(config_class: type) -> list[str]:
    """Every `section.key` of the config."""
    keys = []
    for name, annotation in typing.get_type_hints(config_class).items():
        if dataclasses.is_dataclass(annotation):
            keys += [f"{name}.{key}" for key in _all_keys(annotation)]
        else:
            keys.append(name)
    return keys


# --- types ------------------------------------------------------------------------------------------


def _checked_section(values: dict, section_class: type, keys: tuple[str, ...], config_class: type, where: str) -> dict:
    annotations = typing.get_type_hints(section_class)
    checked = {}
    for key, value in values.items():
        if key not in annotations:
            raise _unknown_key((*keys, key), list(annotations), config_class, where)
        name = ".".join((*keys, key))
        if not dataclasses.is_dataclass(annotations[key]):
            checked[key] = _checked(value, annotations[key], name, where)
        elif isinstance(value, dict):
            checked[key] = _checked_section(value, annotations[key], (*keys, key), config_class, where)
        else:
            raise UserError(f"{where}: {name} is a section; write [{name}], not {name} = {value!r}")
    return checked


def _checked(value: Any, annotation: Any, name: str, where: str) -> Any:
    """`value` if it has the type `annotation`; converts an integer to float if needed. Numbers must be finite."""
    try:
        return _conform(value, annotation)
    except (TypeError, OverflowError):
        raise UserError(f"{where}: {name} = {value!r} should be {_describe(annotation)}") from None


def _conform(value: Any, annotation: Any) -> Any:
    """Like `_checked`; raises TypeError."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        # try float last, so that `float | int` keeps an integer an integer
        for member in sorted(arguments, key=lambda member: member is float):
            try:
                return _conform(value, member)
            except TypeError:
                continue
        raise TypeError
    if origin is typing.Literal:
        if value in arguments and type(value) in {type(choice) for choice in arguments}:
            return value
        raise TypeError
    if annotation is list or origin is list:
        if not isinstance(value, list):
            raise TypeError
        return [_conform(item, arguments[0]) for item in value] if arguments else value
    if annotation is dict or origin is dict:
        if not isinstance(value, dict):
            raise TypeError
        if not arguments:
            return value
        return {_conform(k, arguments[0]): _conform(v, arguments[1]) for k, v in value.items()}
    if annotation is float and type(value) is int:
        value = float(value)
    if type(value) is float and not math.isfinite(value):
        raise TypeError
    if type(value) is str and "\0" in value:  # not allowed in file names
        raise TypeError
    # `type`, not isinstance, because True is an instance of int
    if type(value) is not annotation:
        raise TypeError
    return value


def _describe(annotation: Any) -> str:
    """The expected type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(member) for member in arguments if member is not types.NoneType)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if annotation is list or origin is list:
        return f"a list of {_describe(arguments[0])}" if arguments else "a list"
    if annotation is dict or origin is dict:
        if not arguments:
            return "a table"
        return f"a table of {_describe(arguments[0])} = {_describe(arguments[1])}"
    words = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _parse_text(text: str, annotation: Any) -> Any:
    """The value of a command-line argument; `_checked` checks its type."""
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    kinds = {typing.get_origin(member) or member for member in members}
    if kinds <= {str, types.NoneType}:
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        if not isinstance(value, str | int | float | bool | list | dict):
            value = text  # a date
    except (ValueError, RecursionError):
        value = text
    may_be_one = kinds != {list} and "," not in text  # a single value, such as a number or a name
    if list in kinds and not isinstance(value, list | dict) and not may_be_one:
        return [_parse_scalar(item.strip(), annotation) for item in text.split(",") if item.strip()]
    if float in kinds and isinstance(value, str):
        try:
            return float(text)  # TOML does not allow `.5` and `1.`
        except ValueError:
            return text
    return value


def _parse_scalar(text: str, annotation: Any) -> Any:
    """One item of a comma-separated list."""
    for member in typing.get_args(annotation) if _is_union(annotation) else (annotation,):
        if typing.get_origin(member) is list:
            return _parse_text(text, typing.get_args(member)[0])
    return text


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)

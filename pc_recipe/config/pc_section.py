"""The section `[pc]`: the keys of `pc.PCConfig`, with its descriptions and defaults, and what the recipe adds."""

from dataclasses import Field, fields
from functools import cached_property
from types import GenericAlias
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ConfigDict, create_model

from pc.config import PCConfig
from pc.maps import LEVEL_NAMES
from pc_recipe.config.sections import METHOD, RESULT, Few, Section, key, should

Level = int | str | list[float]
# where TOML's types differ, or the message about a wrong value should name its file
TYPES: dict[str, Any] = {
    "level": Annotated[Level | dict[str, Level], should(f"{LEVEL_NAMES}, coefficients, or a table of these")],
    "power_iterations": Few,
}
DECIDE_RESULT = ("power_iterations", "compute_dtype")  # the others define PC(W)
KEYS = {field.name: field for field in fields(PCConfig) if field.name != "splits"}


def _in_toml(field: Field) -> tuple[Any, Any]:
    """(type, default with description) of a field of `PCConfig`; a tuple is a list in TOML."""
    kind: Any = TYPES.get(field.name, field.type)
    default: Any = field.default
    if get_origin(kind) is tuple:
        kind, default = GenericAlias(list, get_args(kind)[:1]), list(default)
    return kind, key(default, field.metadata["help"], RESULT if field.name in DECIDE_RESULT else None)


_fields: dict[str, Any] = {name: _in_toml(field) for name, field in KEYS.items()}
_Keys: Any = create_model("_Keys", __base__=Section, **_fields)


class PC(_Keys):
    """Polynomial weight preconditioning (`pc.PCConfig`)."""

    model_config = ConfigDict(frozen=True)  # because `pc_config` is cached
    decides = METHOD
    enable: bool = key(False, "Precondition weights; false: a plain Llama 2, the baseline.")
    start: Literal["preserve", "raw"] = key(
        "preserve",
        "preserve: loaded initial weights become PC(W), so that the model stays the same; raw: they become W.",
        RESULT,
    )

    @cached_property
    def pc_config(self) -> PCConfig:
        """The validated `PCConfig`, made once, after all files and overrides have been read; raises UserError."""
        return PCConfig(**{name: getattr(self, name) for name in KEYS})

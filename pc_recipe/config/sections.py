"""What all sections of a configuration have in common: strict types, named kinds of numbers, and what a key decides."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WrapValidator,
    field_validator,
)
from pydantic.fields import FieldInfo

from pc.blocks import BLOCK_GROUPS, BLOCK_SUFFIXES, matches

METHOD = "method"
"""the key is part of the definition of the weights in a checkpoint, which a resume must match"""
RESULT = "result"
"""the key changes what a run computes: runs that agree in these keys and in the method are equal"""
RUN = "run"
"""the key only decides how it runs: speed, memory, rounding, and what is written where"""

MANY = 10**9
"""more steps, sequences, ranks or seconds than anyone needs; torch's timeouts overflow above some 10^10 seconds"""


class Section(BaseModel):
    """A table of a TOML file. 5.5 is no integer, 1 is no bool, NaN is no number, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    decides: ClassVar[str] = RUN
    """what its keys decide, unless a key says otherwise"""

    @field_validator("*", mode="before")
    @classmethod
    def _list_of_words(cls, value: Any, info: Any) -> Any:
        """A list may be written as `"x,y"`."""
        is_list = get_origin(cls.model_fields[info.field_name].annotation) is list
        return [word.strip() for word in value.split(",") if word] if is_list and isinstance(value, str) else value


def keys_of(section: Section, prefix: str = "") -> Iterator[tuple[str, str, Any, FieldInfo]]:
    """("section.key", what it decides, value, pydantic's field) of each key."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            extra: Any = field.json_schema_extra or {}
            decides = extra.get("decides", section.decides)
            yield prefix + name, decides, value, field


def key(default: Any, says: str, decides: str | None = None) -> Any:
    """A key of a section with its description."""
    return Field(default, description=says, json_schema_extra={"decides": decides} if decides else None)


def one_of(table: Mapping[str, Any]) -> AfterValidator:
    """Validates a key that names an entry of `table`."""

    def require(name: str) -> str:
        if name not in table:
            raise ValueError(f"should be one of {', '.join(table)}")
        return name

    return AfterValidator(require)


def should(be: str) -> WrapValidator:
    """Say what a value should be; pydantic's own message lists each type of a union."""

    def one_mistake(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"should be {be}") from None

    return WrapValidator(one_mistake)


def _each_once(factors: dict[str, float]) -> dict[str, float]:
    blocks = [block for entry in factors for block in BLOCK_GROUPS.get(entry, (entry,))]
    if twice := [block for block in blocks if blocks.count(block) > 1]:
        raise ValueError(f"should name {twice[0]} once")
    return factors


def _not_zero(number: int) -> int:
    if number == 0:
        raise ValueError("should be -1, or at least 1")
    return number


Text = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]  # no NUL, which file names may not have
Count = Annotated[int, Field(ge=1, le=MANY)]
Interval = Annotated[int, Field(ge=0, le=MANY)]
Auto = Annotated[int, Field(ge=-1, le=10**6), AfterValidator(_not_zero)]  # -1: computed from other keys
Few = Annotated[int, Field(ge=1, le=1000)]  # a count of things built, started or repeated one by one
Width = Annotated[int, Field(ge=1, le=2**20)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(ge=0, le=1e6)]
Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
BlockFactors = Annotated[
    dict[Annotated[str, one_of(BLOCK_SUFFIXES | BLOCK_GROUPS)], Positive], AfterValidator(_each_once)
]


def block_factor(factors: Mapping[str, float], layer: str) -> float:
    """The factor of a layer's initial weights or learning rate: that of the first entry that matches, or 1."""
    return next((factor for entry, factor in factors.items() if matches(entry, layer)), 1.0)

"""What the entries of a checkpoint that are not tensors may be. Anybody may have written them."""

from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, Field, Json, StringConstraints, TypeAdapter, ValidationError, model_validator
from typing_extensions import TypedDict

from pc_recipe.config.pc_section import PC
from pc_recipe.config.sections import Factor

STEP = "train_state.step"
FINGERPRINT = "method.fingerprint"
Count = Annotated[int, Field(strict=True, ge=0, le=2**50)]
Line = Annotated[str, StringConstraints(pattern=r"^[^\r\n]*$")]


class SavedTokenizer(TypedDict):
    """What a checkpoint or an export says of its tokenizer."""

    name: Line
    sha256: Line


class Fingerprint(BaseModel, strict=True, protected_namespaces=()):
    """The method, the model and the tokenizer of a checkpoint."""

    pc: PC
    """Settings that it leaves out have their defaults."""
    model: dict[Line, int | float] = {}
    """Sizes; older versions named few."""
    tokenizer: SavedTokenizer | None = None

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, saved: Any) -> Any:
        """PC's settings are saved beside the other two."""
        return saved | {"pc": saved} if isinstance(saved, dict) else saved

    @model_validator(mode="after")
    def _require_valid_settings(self) -> "Fingerprint":
        if self.pc.enable:
            _ = self.pc.pc_config
        return self

    @classmethod
    def of(cls, text: str) -> "Fingerprint":
        return cls.model_validate_json(text, extra="ignore")  # keys of other versions


_FORMS: dict[str, Any] = {
    STEP: Count,
    "train_state.ntokens_seen": Count,
    "dataloader.position": Count,
    "dataloader.identity": Json[dict[Line, Line | int]],
    "lr_scheduler.*.last_epoch": Count,
    "optimizer.param_groups.*.lr": Annotated[Factor, Field(strict=True, allow_inf_nan=False)],
    FINGERPRINT: Json[Fingerprint],
}
"""{pattern of names: the type}. The optimizers' other settings come from the config."""
_ADAPTERS = {pattern: TypeAdapter(form) for pattern, form in _FORMS.items()}


def require_valid(name: str, value: Any) -> None:
    """Raise a `ValueError` that says in one line what an entry should be."""
    for pattern, form in _ADAPTERS.items():
        if fnmatchcase(name, pattern):
            try:
                form.validate_python(value, extra="ignore")
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                inside = "".join(f"{key}: " for key in first["loc"])
                raise ValueError(f"{name} = {value!r:.60}: {inside}{' '.join(first['msg'].split())}") from None

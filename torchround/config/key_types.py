"""The base class of every table, and the types of keys. The docstring under a key is its documentation."""

import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

UNSET = "none"
"""The value that clears an optional key which a base file set: `--model.flavor none`."""

MAX_INT = 2**63 - 1
"""The largest integer that every TOML reader keeps exactly."""

PositiveInt = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


def _matched_in_time(pattern: str) -> str:
    """Refuse what is no regular expression, and what could take for ever to match: a config may be a stranger's."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression is wanted: {error}") from None
    if re.search(r"\)[*+{]", pattern) or len(re.findall("[*+{]", pattern)) > 3:
        raise ValueError("a regular expression with at most three repeats, and none of a group, is wanted")
    return pattern


ModulePattern = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_matched_in_time)]
"""A regular expression for names of modules."""


class Table(BaseModel):
    """Base class of every table: strict types, no unknown keys, frozen.

    An integer is allowed where a float is expected. A string, a bool or a float is not an integer.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {key for key, info in cls.model_fields.items() if info.default is None}
        return {key: value for key, value in data.items() if value != UNSET or key not in optional}


Item = TypeVar("Item")
_from_array = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)

Many = Annotated[tuple[Item, ...], _from_array]
"""A TOML array of any length."""

Pair = Annotated[tuple[Item, Item], _from_array]
"""A TOML array of two."""

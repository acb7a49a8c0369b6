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
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


def matching(pattern: str, words: str) -> AfterValidator:
    """Return a check of a string, whose message has `words` in place of the pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"use {words}")
        return text

    return AfterValidator(check)


class Table(BaseModel):
    """Base class of every table: strict types, no unknown keys, frozen.

    An integer is allowed where a float is expected. A string, a bool or a float is not an integer.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if not cls._is_cleared(key, value)}

    @classmethod
    def _is_cleared(cls, key: str, value: Any) -> bool:
        field = cls.model_fields.get(key)
        return value == UNSET and field is not None and not field.is_required() and field.default is None


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Item = TypeVar("Item")

Many = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]
"""A TOML array of any length."""

Pair = Annotated[tuple[Item, Item], BeforeValidator(_as_tuple)]
"""A TOML array of two."""

"""What every config table has in common: strict types, no unknown keys, frozen, a docstring under each key.

The docstring under a key is its documentation: `--help`, error messages and docs/configuration.md read it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

UNSET = "none"
"""Given for a key that may be left out, it takes back what a base file set: `--model.flavor none`."""


class Table(BaseModel):
    """Base of every table. An integer is a legal float; a string, a bool or a float is no integer."""

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
        return {key: value for key, value in data.items() if not cls._takes_back(key, value)}

    @classmethod
    def _takes_back(cls, key: str, value: Any) -> bool:
        field = cls.model_fields.get(key)
        return value == UNSET and field is not None and not field.is_required() and field.default is None


@dataclass(frozen=True)
class Legal:
    """Annotation that says in words what is legal, where a pattern would not be understood."""

    text: str


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Item = TypeVar("Item")

Many = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]
"""A TOML array of any length."""

Pair = Annotated[tuple[Item, Item], BeforeValidator(_as_tuple)]
"""A TOML array of two."""

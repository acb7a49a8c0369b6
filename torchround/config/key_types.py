"""The types of config keys: the base class of every table, and what is legal for a key, in words.

The docstring under a key is its documentation. `--help`, error messages and docs/configuration.md are made from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from torchround.config.errors import show

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


class Table(BaseModel):
    """Base class of every table: strict types, no unknown keys, frozen.

    An integer is legal where a float is expected. A string, a bool or a float is not an integer.
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


@dataclass(frozen=True)
class Legal:
    """Annotation that says in words what is legal, for keys whose pattern a user would not understand."""

    text: str


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Item = TypeVar("Item")

Many = Annotated[tuple[Item, ...], BeforeValidator(_as_tuple)]
"""A TOML array of any length."""

Pair = Annotated[tuple[Item, Item], BeforeValidator(_as_tuple)]
"""A TOML array of two."""


@dataclass(frozen=True)
class KeyType:
    """The Python type of one key, array element or table, with the constraints annotated on it."""

    annotation: Any
    constraints: tuple[Any, ...] = ()

    @staticmethod
    def of_field(field: FieldInfo) -> "KeyType":
        """Return the type of a table's field."""
        return KeyType(field.annotation, tuple(field.metadata)).unwrapped()

    def unwrapped(self) -> "KeyType":
        """Remove `Annotated`, and the `None` of an optional key."""
        if get_origin(self.annotation) is Annotated:
            inner, *metadata = get_args(self.annotation)
            flat = [
                m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])
            ]
            return KeyType(inner, (*self.constraints, *flat)).unwrapped()
        members = [member for member in self.members() if member is not NoneType]
        if len(members) == 1:
            return KeyType(members[0], self.constraints).unwrapped()
        return self

    def members(self) -> tuple[Any, ...]:
        """Return the alternatives of a union; empty for any other type."""
        return get_args(self.annotation) if get_origin(self.annotation) in (Union, UnionType) else ()

    def table(self) -> type[Table] | None:
        """Return the table class, or None for any other type."""
        # On Python 3.10, `tuple[int, ...]` is an instance of `type`, so the origin is asked too.
        is_class = isinstance(self.annotation, type) and get_origin(self.annotation) is None
        return self.annotation if is_class and issubclass(self.annotation, Table) else None

    def item(self) -> "KeyType | None":
        """Return the type of an array's elements, or None for any other type."""
        if get_origin(self.annotation) is not tuple:
            return None
        return KeyType(get_args(self.annotation)[0]).unwrapped()

    def choices(self) -> tuple[str, ...]:
        """Return the strings that are legal by name, including the ones of a union's members."""
        if get_origin(self.annotation) is Literal:
            return get_args(self.annotation)
        return tuple(name for member in self.members() for name in KeyType(member).unwrapped().choices())

    def find(self, constraint: type) -> Any:
        """Return the first constraint of the given class, or None."""
        return next((c for c in self.constraints if isinstance(c, constraint)), None)


def describe(key_type: KeyType) -> str:
    """Say in words what is legal, for example `an integer of at least 1 or "auto"`."""
    if (legal := key_type.find(Legal)) is not None:
        return str(legal.text)
    members = [member for member in key_type.members() if member is not NoneType]
    if members:
        return " or ".join(describe(KeyType(member).unwrapped()) for member in members)
    if key_type.choices():
        return " or ".join(show(choice) for choice in key_type.choices())
    if (table := key_type.table()) is not None:
        return f"a table {{{', '.join(table.model_fields)}}}"
    if key_type.item() is not None:
        return _describe_array(key_type)
    return _SCALARS[key_type.annotation] + _describe_bounds(key_type)


_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _describe_array(key_type: KeyType) -> str:
    item = key_type.item()
    assert item is not None, "only called for arrays"
    arguments: Sequence[Any] = get_args(key_type.annotation)
    size = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
    if key_type.find(annotated_types.MinLen):
        size = f" of at least {key_type.find(annotated_types.MinLen).min_length}"
    return f"an array{size}, each element {describe(item)}"


def _describe_bounds(key_type: KeyType) -> str:
    parts = []
    if (ge := key_type.find(annotated_types.Ge)) is not None:
        parts.append(f"of at least {ge.ge}")
    if (gt := key_type.find(annotated_types.Gt)) is not None:
        parts.append(f"above {gt.gt}")
    # The bound of all integers is left out: it matters only to a user who exceeds it.
    if (le := key_type.find(annotated_types.Le)) is not None and le.le != MAX_INT:
        parts.append(f"at most {le.le}")
    if (lt := key_type.find(annotated_types.Lt)) is not None:
        parts.append(f"below {lt.lt}")
    if (min_len := key_type.find(annotated_types.MinLen)) is not None:
        parts.append(f"of at least {min_len.min_length} character")
    return f" {' and '.join(parts)}" if parts else ""


def locate(key_type: KeyType, path: Sequence[int | str]) -> tuple[str, KeyType]:
    """Follow the path of a pydantic error into the tables.

    Returns the key as a user writes it (`data.sources[0].path`) and the type there; for an unknown key, the table
    around it. Pydantic's paths also hold the names of union members, which are not part of the key. A path that
    leads into none of a union's tables stops at the union.
    """
    key = ""
    for depth, part in enumerate(path, start=1):
        if (table := key_type.table()) is not None:
            key = f"{key}.{part}" if key else str(part)
            if part not in table.model_fields:
                return key, key_type
            key_type = KeyType.of_field(table.model_fields[str(part)])
        elif (item := key_type.item()) is not None:
            key, key_type = f"{key}[{part}]", item
        else:
            members = [KeyType(member).unwrapped() for member in key_type.members()]
            chosen = [m for m in members if (t := m.table()) is not None and t.__name__ == part]
            if not chosen or depth == len(path):
                return key, key_type
            key_type = chosen[0]
    return key, key_type

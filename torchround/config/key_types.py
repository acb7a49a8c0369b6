"""What every config table has in common: strict types, no unknown keys, frozen, a docstring under each key.

The docstring under a key is its documentation: `--help`, error messages and docs/configuration.md read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from torchround.config.errors import show
from torchround.config.tables import MAX_INT

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


# What is legal for a key, in words, read from its type: for messages, `--help` and docs/configuration.md.


@dataclass(frozen=True)
class KeyType:
    """The type at one place of a config, with the constraints that were written beside it."""

    annotation: Any
    constraints: tuple[Any, ...] = ()

    @staticmethod
    def of_field(field: FieldInfo) -> "KeyType":
        return KeyType(field.annotation, tuple(field.metadata)).unwrapped()

    def unwrapped(self) -> "KeyType":
        """Without `Annotated` and the `None` of a key that may be left out."""
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
        """The alternatives of a union; empty for any other type."""
        return get_args(self.annotation) if get_origin(self.annotation) in (Union, UnionType) else ()

    def table(self) -> type[Table] | None:
        # On Python 3.10, `tuple[int, ...]` passes as a type.
        is_class = isinstance(self.annotation, type) and get_origin(self.annotation) is None
        return self.annotation if is_class and issubclass(self.annotation, Table) else None

    def item(self) -> "KeyType | None":
        """The elements of an array; `None` for any other type."""
        if get_origin(self.annotation) is not tuple:
            return None
        return KeyType(get_args(self.annotation)[0]).unwrapped()

    def choices(self) -> tuple[str, ...]:
        """The strings that are legal by name, also those of a union."""
        if get_origin(self.annotation) is Literal:
            return get_args(self.annotation)
        return tuple(name for member in self.members() for name in KeyType(member).unwrapped().choices())

    def find(self, constraint: type) -> Any:
        return next((c for c in self.constraints if isinstance(c, constraint)), None)


def describe(slot: KeyType) -> str:
    """For example `an integer of at least 1 or "auto"`."""
    if (legal := slot.find(Legal)) is not None:
        return str(legal.text)
    members = [member for member in slot.members() if member is not NoneType]
    if members:
        return " or ".join(describe(KeyType(member).unwrapped()) for member in members)
    if slot.choices():
        return " or ".join(show(choice) for choice in slot.choices())
    if (table := slot.table()) is not None:
        return f"a table {{{', '.join(table.model_fields)}}}"
    if slot.item() is not None:
        return _describe_array(slot)
    return _SCALARS[slot.annotation] + _describe_bounds(slot)


_SCALARS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def _describe_array(slot: KeyType) -> str:
    item = slot.item()
    assert item is not None, "only called for arrays"
    arguments: Sequence[Any] = get_args(slot.annotation)
    size = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
    if slot.find(annotated_types.MinLen):
        size = f" of at least {slot.find(annotated_types.MinLen).min_length}"
    return f"an array{size}, each element {describe(item)}"


def _describe_bounds(slot: KeyType) -> str:
    parts = []
    if (ge := slot.find(annotated_types.Ge)) is not None:
        parts.append(f"of at least {ge.ge}")
    if (gt := slot.find(annotated_types.Gt)) is not None:
        parts.append(f"above {gt.gt}")
    if (le := slot.find(annotated_types.Le)) is not None and le.le != MAX_INT:
        parts.append(f"at most {le.le}")
    if (lt := slot.find(annotated_types.Lt)) is not None:
        parts.append(f"below {lt.lt}")
    if (min_len := slot.find(annotated_types.MinLen)) is not None:
        parts.append(f"of at least {min_len.min_length} character")
    return f" {' and '.join(parts)}" if parts else ""


def locate(slot: KeyType, path: Sequence[int | str]) -> tuple[str, KeyType]:
    """Follow a path of pydantic's error into the tables.

    Returns the key as a user writes it (`data.sources[0].path`) and the type there; for a key that is unknown, the
    table around it. The names of union members,
    which pydantic puts into its paths, are not part of the key; a path that
    leads into none of its tables stops at the union.
    """
    key = ""
    for depth, part in enumerate(path, start=1):
        if (table := slot.table()) is not None:
            key = f"{key}.{part}" if key else str(part)
            if part not in table.model_fields:
                return key, slot
            slot = KeyType.of_field(table.model_fields[str(part)])
        elif (item := slot.item()) is not None:
            key, slot = f"{key}[{part}]", item
        else:
            members = [KeyType(member).unwrapped() for member in slot.members()]
            chosen = [m for m in members if (t := m.table()) is not None and t.__name__ == part]
            if not chosen or depth == len(path):
                return key, slot
            slot = chosen[0]
    return key, slot

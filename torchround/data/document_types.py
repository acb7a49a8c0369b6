"""What a document is: where it is stored, and what it holds once it is read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchround.data.errors import DataError

TokenIds = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TextSpan:
    """A part of a rendered conversation: text, or the name of one special token; learnt or not."""

    text: str
    learn: bool
    special: bool = False


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, each with `role` and `content`, and the tools that are offered."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()


Content = str | TokenIds | tuple[TextSpan, ...]
"""Text to be framed by BOS and EOS; token ids `[n]` as they are; a rendered conversation."""

Record = bytes | dict[str, Any] | DataError
"""A line, the fields of a row, or why it could not be read."""

Cursor = list[int]
"""Where a source is in a pass over its documents; what the numbers mean is the source's business."""


@dataclass(frozen=True)
class Document:
    """From `start_byte` of a file to its end (`number` 0), or a record: line or row `number`, from 1.

    A record of a stream carries its content: the bytes of its line, its fields, or why it could not be read.
    """

    path: Path | str
    start_byte: int = 0
    number: int = 0
    unit: str = "line"
    record: Record | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}" if self.number else str(self.path)

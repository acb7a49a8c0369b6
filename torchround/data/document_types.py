"""The types and errors that readers, tokenizers and packers share: a document, its content, and where a source is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchround.untrusted.terminal import terminal_safe

TokenIds = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class DataError(ValueError):
    """An error in a source that is missing, empty or unreadable, or in a saved position of other data."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


class DataFileError(DataError):
    """An error of a file, not of a record: it vanished, changed during the run, is damaged, or cannot be read.

    It stops a run whatever `data.on_bad_record` says: leaving out all that is on a lost disk would train on the rest.
    """


def cannot_be_read(path: object, error: OSError) -> DataFileError:
    return DataFileError(f"{path}: cannot be read: {error.strerror or error}")


class TokenizerError(DataError):
    """An error in the choice of a tokenizer, or in its file: missing, damaged or of an unsupported kind."""


class MissingTokenizerError(TokenizerError):
    """The error of a tokenizer path that does not exist. `key` is the config key that gives the path."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


@dataclass(frozen=True)
class TextSpan:
    """A part of a rendered conversation: plain text, or a special token's name if `special`. `learn`: tokens are labels.

    `begins`: the document's text begins here, although the token that opens documents comes before.
    """

    text: str
    learn: bool
    special: bool = False
    begins: bool = False


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, each with `role` and `content`, and the tools that are offered."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()


Content = str | TokenIds | tuple[TextSpan, ...]
"""The content of a document: text, which BOS and EOS frame later; token ids `[n]`, used unchanged; or a rendered
conversation."""

Record = bytes | dict[str, Any]
"""A record as a file holds it: a line, or the fields of a row."""

Cursor = list[int]
"""Where a source is in one pass over its documents. Each kind of source gives the numbers its own meaning."""


@dataclass(frozen=True)
class Document:
    """One document: a whole text file (`number` 0), or a record of a file (line or row `number`, from 1).

    `start_byte` is where the file's text or the record's line begins. `record` is the record, or reads it. `file_bytes`
    is the size that a text file had when the run began.
    """

    path: Path | str
    start_byte: int = 0
    number: int = 0
    unit: str = "line"
    record: Record | Callable[[], Record] | None = field(default=None, repr=False, compare=False)
    file_bytes: int | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.path}, {self.unit} {self.number}" if self.number else str(self.path)

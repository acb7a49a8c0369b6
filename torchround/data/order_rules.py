"""The rules that turn documents into the order of sequences, as a saved position names them.

A run keeps the rules that it began with. So a position says which ones it was saved under, and a loader that continues
from it follows these.
"""

from dataclasses import dataclass
from typing import Any

from torchround.config import DataTable
from torchround.data.opening import packs_whole_documents
from torchround.data.packing.window_shuffle import auto_window

LATEST = 2
"""Rules by number. 1: the epochs of a source have independent orders, and windows reach across their ends. 2: copies of
a document are kept apart. A position without a number is of rules 1."""
MOST_SEQUENCES = 65536


@dataclass(frozen=True)
class OrderRules:
    """Number of the rules, and the sequences per shuffled window, 0 for none."""

    number: int
    window: int

    @property
    def copies_apart(self) -> bool:
        """Whether copies of a document from different epochs are kept apart."""
        return self.number >= 2

    def window_of_each(self, num_streams: int) -> int:
        """Return the sequences in a window of each stream: all windows together have those of one stream's window."""
        return -(-self.window // num_streams)

    def identity(self, seq_len: int) -> dict[str, Any]:
        """Return the entries that a position has of them. Keys are added only if they matter."""
        entries: dict[str, Any] = {"order": self.number} if self.number > 1 else {}
        # A window that is half used up must be packed again into the same sequences.
        if self.window:
            entries |= {"seq_len": seq_len, "shuffle_sequences": self.window}
        return entries


def rules_for(data: DataTable, seq_len: int) -> OrderRules:
    """Return the rules of a run that begins now."""
    window = data.shuffle_sequences
    if window == "auto":
        # Whole documents leave in a mixed order already.
        window = auto_window(seq_len) if data.shuffle and not packs_whole_documents(data) else 0
    return OrderRules(LATEST, window)


def rules_of(saved: dict[str, Any], data: DataTable, own: OrderRules) -> OrderRules:
    """Return the rules that a position was saved under, for a run whose config asks for `own`.

    A window that the config names stays: `Loader` refuses the position if another one was saved.
    """
    number, window = saved.get("order", 1), own.window
    if data.shuffle_sequences == "auto":
        window = saved.get("shuffle_sequences", 0)
    is_known = type(number) is int and 1 <= number <= LATEST
    is_window = type(window) is int and 0 <= window <= MOST_SEQUENCES
    return OrderRules(number if is_known else own.number, window if is_window else own.window)

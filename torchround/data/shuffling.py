"""Orders that a key fixes, and the shuffle of packed sequences within windows.

Nothing is drawn from a random stream. Numbers are sorted by a hash, so that an order is the same with every version of
every library, and a position in it is one integer.

Windows spread a long document over many batches: documents follow one another, so the sequences of one book would fill
many batches in a row. The order of all windows together does not depend on the batch size or on threads. A saved
position has the packer's state at the window's start and how many sequences are handed out. It stays small, and a
resumed run packs one window again. While a window is handed out, the next one is packed at the same pace: both together
hold as many sequences as one, and no batch waits for a whole window but the first one, and one after a window that
ended early with its epoch.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from torchround.data.document_types import DataError, DataFileError
from torchround.data.packing import PackedSequence, progress_so_far
from torchround.untrusted.terminal import Progress

Order = npt.NDArray[np.integer]
AUTO_SEQUENCES = 4096
AUTO_TOKENS = 1 << 24
LEAST_AUTO_SEQUENCES = 128
WAITING_TOKEN_BYTES = 9  # of a token in `PackedSequence`


@dataclass(frozen=True)
class EpochKey:
    """The key of one epoch's order. `first` is the key of the first epoch if this order has to stay close to it."""

    key: str
    first: str | None = None

    def within(self, part: str) -> "EpochKey":
        return EpochKey(f"{self.key}/{part}", None if self.first is None else f"{self.first}/{part}")


def epoch_order(count: int, key: EpochKey) -> Order:
    """Shuffle `range(count)` into the order of an epoch; 4 bytes per number.

    Each order by itself is as random as one of `shuffled`. If `key.first` is given, each number also keeps its place in
    the first epoch's order to within a quarter of the epoch. Otherwise the last documents of an epoch could be the
    first ones of the next, so that a step would train twice on the same ones.
    """
    if key.first is None:
        return shuffled(count, key.key)
    place = _hashes(count, key.first)
    place >>= np.uint64(1)  # leaves room for the sum
    shift = _hashes(count, key.key)
    shift >>= np.uint64(3)  # a quarter of the range of `place`
    place += shift
    return _sorted_by(place)


def shuffled(count: int, key: str) -> Order:
    """Shuffle `range(count)` into the order that `key` fixes; 4 bytes per number."""
    return _sorted_by(_hashes(count, key))


def _hashes(count: int, key: str) -> npt.NDArray[np.uint64]:
    """Compute the SplitMix64 hash (Steele et al. 2014) of each number. It has no collisions."""
    seed = np.frombuffer(hashlib.sha256(key.encode()).digest()[:8], dtype="<u8")
    mixed = np.arange(1, count + 1, dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)  # in place: each copy of 10 M numbers would take 80 MB
    mixed += seed
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _sorted_by(hashes: npt.NDArray[np.uint64]) -> Order:
    return np.argsort(hashes, kind="stable").astype(np.uint32 if len(hashes) < 2**32 else np.int64)


# Windows.


def auto_window(seq_len: int) -> int:
    """Count the sequences per window of `data.shuffle_sequences = "auto"`: at most 4096, of about 16 Mi tokens."""
    return min(AUTO_SEQUENCES, max(LEAST_AUTO_SEQUENCES, AUTO_TOKENS // seq_len))


class Window:
    """One window: filled in the packer's order until it is full, and then emptied in its own order.

    `state` is the packer's at the window's start. The window ends early when each source that it has documents of has
    begun another epoch: copies of small data would otherwise be mixed.
    """

    def __init__(self, number: int, state: dict[str, Any], size: int) -> None:
        self.number, self.state = number, state
        self.state_after = state
        self.is_full = False
        self.is_last = False
        self.error: DataError | None = None
        self.waiting: list[PackedSequence] = []
        self._size = size

    def take_from(self, packer: BaseNode[PackedSequence | DataError]) -> None:
        """Take one sequence, if any is missing. An error, and the end of the data, also fill the window."""
        if self.is_full:
            return
        row = next(packer, None)
        if isinstance(row, DataError):
            self.error, self.is_full = row, True
            return
        self.state_after = packer.state_dict()
        self.is_last = row is None
        if row is not None:
            self.waiting.append(row)
        self.is_full = self.is_last or len(self.waiting) == self._size or self._has_an_epoch()

    def shuffle(self, seed: int, taken: int) -> None:
        """Put the sequences into the order in which they leave from the end of the list, without the first `taken`."""
        assert self.is_full, f"window {self.number} is shuffled before it is full"
        order = shuffled(len(self.waiting), f"sequences/{seed}/{self.number}").tolist()
        self.waiting = [self.waiting[index] for index in reversed(order[taken:])]

    def _has_an_epoch(self) -> bool:
        begun, now = (progress_so_far(state)["reader"]["sources"] for state in (self.state, self.state_after))
        pairs = list(zip(begun, now, strict=True))
        new_epochs = [
            after["epoch"] > before["epoch"] for before, after in pairs if after["drawn"] > before["drawn"]
        ]
        return bool(new_epochs) and all(new_epochs)


class SequenceShuffler(BaseNode[PackedSequence | DataError]):
    """The sequences of a packer in a new order within each window of `window_size` sequences.

    An error takes the place of the whole window that it falls into, and so a bad record always stops a run at the same step.
    A file that cannot be read stops it as soon as it is met, which depends on when it vanished anyway.
    """

    def __init__(self, packer: BaseNode[PackedSequence | DataError], window_size: int, seed: int) -> None:
        super().__init__()
        self._packer = packer
        self._window_size = window_size
        self._seed = seed

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = initial_state or {"window": 0, "taken": 0, "packing": None}
        self._packer.reset(state["packing"])
        # The saved state and not the packer's own: a packer of whole documents goes back to its group's start, and its
        # progress there would end the window elsewhere.
        begun = state["packing"] or self._packer.state_dict()
        self._begin(self._window(state["window"], begun), state["taken"])

    def _begin(self, window: Window, taken: int) -> None:
        self._current: Window = window
        self._following: Window | None = None
        self._taken: int = taken
        self._is_shuffled: bool = False

    def get_state(self) -> dict[str, Any]:
        """Save where the packer was at the window's start, and how many of the window's sequences are handed out.

        For reports alone, `sequences` is the number of all of them, 0 until it is known, and `so_far` holds the reader's
        progress and the number of long documents up to the window's end.
        """
        window = self._current
        return {
            "window": window.number,
            "taken": self._taken,
            "sequences": self._taken + len(window.waiting) if self._is_shuffled else 0,
            "packing": window.state,
            "so_far": progress_so_far(window.state_after if self._taken else window.state),
        }

    def next(self) -> PackedSequence | DataError:
        window = self._filled()
        while not window.waiting and not window.is_last and window.error is None:
            # The data ended here when the position was saved, and have more epochs now.
            self._begin(self._window(window.number + 1, window.state_after), 0)
            window = self._filled()
        error = window.error
        if self._following is not None and isinstance(self._following.error, DataFileError):
            error = self._following.error  # a file that is lost stops the run now, and not a window later
        if error is not None:
            return error
        if not window.waiting:
            raise StopIteration
        sequence = window.waiting.pop()
        self._taken += 1
        if not window.is_last:
            self._look_ahead(window)
        return sequence

    def _filled(self) -> Window:
        window = self._current
        if not window.is_full:
            progress = Progress("packing sequences to shuffle", self._window_size)
            while not window.is_full:
                window.take_from(self._packer)
                progress.advance()
        if not self._is_shuffled and window.error is None:
            window.shuffle(self._seed, self._taken)
            self._is_shuffled = True
        return window

    def _look_ahead(self, window: Window) -> None:
        """Take a sequence for the next window, and turn to that window if this one is empty."""
        if self._following is None:
            self._following = self._window(window.number + 1, window.state_after)
        self._following.take_from(self._packer)
        if not window.waiting:
            # Begun at once, so that a state saved here starts at the new window and does not pack the old one again.
            self._begin(self._following, 0)

    def _window(self, number: int, state: dict[str, Any]) -> Window:
        return Window(number, state, self._window_size)

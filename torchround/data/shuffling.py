"""Orders that a key fixes: of the documents in an epoch, of the sequences in a window or in a group.

Nothing is drawn from a random stream. Numbers are sorted by a hash, so that an order is the same with every version of
every library, and a position in it is one integer.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.integer]


@dataclass(frozen=True)
class EpochKey:
    """The key of one epoch's order. `first` is the key of the first epoch if this order has to stay close to it."""

    key: str
    first: str | None = None

    def within(self, part: str) -> "EpochKey":
        """Return the key of the order inside one part of the epoch."""
        return EpochKey(f"{self.key}/{part}", None if self.first is None else f"{self.first}/{part}")


def epoch_order(count: int, key: EpochKey) -> Order:
    """Return `range(count)` in the order of an epoch; 4 bytes per number.

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
    """Return `range(count)` in the order that `key` fixes; 4 bytes per number."""
    return _sorted_by(_hashes(count, key))


def _hashes(count: int, key: str) -> npt.NDArray[np.uint64]:
    """Return the SplitMix64 hash (Steele et al. 2014) of each number. It has no collisions."""
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

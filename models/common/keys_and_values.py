"""Keys and values of the tokens so far, kept by a block on the device that runs it: text grows by one token a pass.

A group of sequences is padded on the left, so that all of them end at the same place. Padding has positions too, but
they are those of documents of their own: the first real token of a sequence is at position 0.

Shapes: B sequences, T new tokens, S tokens so far, T included, H heads, K kv heads, C channels of a head.
"""

import torch
from torch import Tensor

from torchround.models.common.packed_attention import Once


class KeysAndValues:
    """The keys and values `[B, S, K, C]` of one block, in memory for `capacity` tokens that the first call takes.

    One thread at a time may use it. The memory belongs to the device of the first call, and later calls must come from
    there.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(0 if held is None else held.nbytes for held in (self._keys, self._values))

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[B, T, K, C]` each, and return all keys and values so far, `[B, S, K, C]`."""
        start, self.length = self.length, self.length + key.shape[1]
        assert self.length <= self.capacity, f"{self.length} tokens, and room for {self.capacity}"
        self._keys, self._values = (
            self._extended(held, new, start) for held, new in ((self._keys, key), (self._values, value))
        )
        return self._keys[:, : self.length], self._values[:, : self.length]

    def clear(self) -> None:
        self._keys = self._values = None

    def _extended(self, held: Tensor | None, new: Tensor, start: int) -> Tensor:
        if held is None:
            held = new.new_empty((new.shape[0], self.capacity, *new.shape[2:]))
        assert held.device == new.device, (
            f"keys and values are on {held.device}, the block runs on {new.device}"
        )
        held[:, start : self.length] = new
        return held


def past_mask(positions: Tensor, length: int, window: int | None, dtype: torch.dtype, once: Once) -> Tensor:
    """Make the mask `[B, 1, T, S]` to add to the scores of the last T of S = `length` tokens: 0 or minus infinity.

    `positions [B, T]` say how many tokens of its document come before each of them; only padding comes before
    those. With a `window` a token sees itself and the `window - 1` before it. All blocks of the same window share one
    mask by `once`.
    """

    def make() -> Tensor:
        tokens = positions.shape[1]
        every = torch.arange(length, device=positions.device)  # [S]
        own = every[length - tokens :]  # [T]: where the new tokens are
        seen = positions if window is None else positions.clamp(max=window - 1)
        first = (own - seen)[:, None, :, None]  # [B, 1, T, 1]: the first token that each one sees
        allowed = (every >= first) & (every <= own[:, None])  # [B, 1, T, S]
        return additive_mask(allowed, dtype)

    return once(("mask of the past", window, length), make)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Write 0 for allowed pairs `[B, 1, T, S]`, else -inf, in rows padded to 16 elements, as CUDA kernels want them."""
    *rows, length = allowed.shape
    mask = torch.zeros((*rows, length + -length % 16), dtype=dtype, device=allowed.device)[..., :length]
    return mask.masked_fill_(~allowed, -torch.inf)

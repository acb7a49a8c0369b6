"""Micro-batches: what the engine asks of any, and the integers of token sequences, which our models take.

Shapes: B sequences of a micro-batch, T tokens of a sequence.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

IGNORED_LABEL = -100
KERNEL_BLOCK = 128  # tokens that a flash kernel takes at once


class Batch(Protocol):
    """The interface that the engine needs from a micro-batch. `MicroBatch` is one; a library may have its own."""

    @property
    def shape(self) -> torch.Size:
        """The sizes that decide what buffers a pass needs: `[B, T]` of a `MicroBatch`."""

    def tensors(self) -> tuple[Tensor, ...]: ...

    def rebuild(self) -> Callable[[Sequence[Tensor]], "Batch"]:
        """Return what makes the same batch from the tensors on a device. It must not refer to this one's tensors."""

    def for_layer(self, index: int) -> "Batch": ...

    def for_training(self, loss_factor: float) -> "Batch":
        """Return the batch of a forward whose backward follows at once and multiplies the loss by `loss_factor`."""

    def num_labels(self) -> int:
        """Count the labels; summed over a step they are the loss divisor."""

    def problem(self) -> str | None: ...


@dataclass(frozen=True)
class MicroBatch:
    """The integers of a batch, or of one micro-batch cut from it. All tensors are `[B, T]` int64.

    A micro-batch goes up to each device that needs it once per round.

    `labels[b, t]` is the token that position `t` must predict (already shifted), or `IGNORED_LABEL`.
    `positions` restart at 0 with each document. `document_ids` are equal exactly when two tokens of a
    sequence belong to the same document; attention never crosses documents.

    Six facts travel beside the tensors, so that no layer has to ask a device for them:

    - `dropout_seed` seeds the dropout masks. It is the same whenever the same layer sees the same micro-batch
      of a step again. None means no dropout.
    - `max_documents` bounds the number of documents in a sequence, each of them contiguous. It is a fact of the
      whole batch (see `most_documents`), so a choice made from it does not depend on how the batch was cut. None
      means that the documents were not counted.
    - `longest_document` bounds the tokens of a document (see `longest_document`). It changes no result. None means T.
    - `loss_factor` promises the last layer that a backward follows and that its gradient of the loss is this number:
      the loss scale divided by the step's labels. The layer may then compute and add up gradients in its forward. None
      promises nothing. Compiled layers get None.
    - `wants` is "loss", or "logits": the last layer then returns fp32 logits `[B, V]` of each sequence's last position.
    - `cache` holds keys and values of earlier tokens, if any, and gives each layer its own by `for_layer(index)`.

    While a layer is being compiled, a seed and bounds above 1 are 0-dimensional tensors in host memory, so that
    one piece of code serves all values.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor
    dropout_seed: int | Tensor | None = field(default=None, kw_only=True)
    max_documents: int | Tensor | None = field(default=None, kw_only=True)
    longest_document: int | Tensor | None = field(default=None, kw_only=True)
    loss_factor: float | None = field(default=None, kw_only=True)
    wants: str = field(default="loss", kw_only=True)
    cache: Any = field(default=None, kw_only=True)
    # Shared by the copies that `for_layer` makes, and dropped with the last of them.
    _derived: dict[Hashable, Any] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    @property
    def shape(self) -> torch.Size:
        return self.tokens.shape

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, which the first layer that asks for `key` computes for all layers.

        For small tensors that follow from the integers and the model's settings. They live as long as the
        micro-batch, which on a device is until the next round. Not for a layer that is being compiled.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.labels, self.positions, self.document_ids)

    def facts(self) -> dict[str, Any]:
        return {
            "dropout_seed": self.dropout_seed,
            "max_documents": self.max_documents,
            "longest_document": self.longest_document,
            "loss_factor": self.loss_factor,
            "wants": self.wants,
            "cache": self.cache,
        }

    def with_tensors(self, tensors: Iterable[Tensor]) -> "MicroBatch":
        """Return the same facts with other tensors, in field order: on another device, or fewer sequences."""
        return MicroBatch(*tensors, **self.facts())

    def rebuild(self) -> Callable[[Sequence[Tensor]], "MicroBatch"]:
        return partial(_rebuilt, self.facts())

    def for_layer(self, index: int) -> "MicroBatch":
        """Return the micro-batch that layer `index` gets: the same, with a 63-bit dropout seed and a cache of its own."""
        if self.dropout_seed is None and self.cache is None:
            return self
        own = self.dropout_seed
        if own is not None:
            assert isinstance(own, int), "only a layer being compiled gets tensors for facts"
            # Odd constants spread neighbouring seeds and layers over all 63 bits.
            own = (own * 0xD1342543DE82EF95 + index * 0xAF251AF3B0F025B5) % 2**63
        cache = None if self.cache is None else self.cache.for_layer(index)
        return replace(self, dropout_seed=own, cache=cache)

    def for_training(self, loss_factor: float) -> "MicroBatch":
        return replace(self, loss_factor=loss_factor)

    def num_labels(self) -> int:
        return int((self.labels != IGNORED_LABEL).sum())

    def problem(self) -> str | None:
        names = ("tokens", "labels", "positions", "document_ids")
        for name, tensor in zip(names, self.tensors(), strict=True):
            if tensor.dtype != torch.int64 or tensor.dim() != 2 or tensor.shape != self.shape:
                return (
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; "
                    f"expected int64 [B, T] like tokens {tuple(self.shape)}"
                )
        return None


def _rebuilt(facts: Mapping[str, Any], tensors: Sequence[Tensor]) -> MicroBatch:
    return MicroBatch(*tensors, **facts)


def most_documents(document_ids: Tensor) -> int | None:
    """Count the documents of each sequence of `[B, T]` and return the largest count, for `max_documents`.

    Return None if a document appears in two pieces. Reads the tensor, so it is for host memory.
    """
    changes = document_ids[:, 1:] - document_ids[:, :-1]
    # Ids grow along a sequence; a smaller id after a larger one is a document that comes back.
    return None if (changes < 0).any() else 1 + int((changes != 0).sum(dim=1).max())


def longest_document(document_ids: Tensor) -> int:
    """Return a bound on the tokens of a document of `[B, T]`, in whole blocks of attention kernels. For host memory."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    longest = int(torch.diff(starts, append=starts.new_tensor([begins.numel()])).max())
    return min(longest + -longest % KERNEL_BLOCK, document_ids.shape[1])


def with_dropout_seeds(
    micro_batches: Sequence[MicroBatch], seed: int, step: int, numbers: Sequence[int] | None = None
) -> list[MicroBatch]:
    """Give each micro-batch of a training step the number that its dropout masks are made from.

    `numbers` are the micro-batches' numbers in the step, if they are not all of the step's.
    """
    first = (seed * 2**40 + step) * 2**20  # room for 2^20 micro-batches: no two steps of a run share a number
    if numbers is None:
        numbers = range(len(micro_batches))
    pairs = zip(micro_batches, numbers, strict=True)
    return [replace(part, dropout_seed=first + number) for part, number in pairs]

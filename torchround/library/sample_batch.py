"""Batches of samples: how inputs and labels are cut into micro-batches, and how outputs are joined again.

Inputs and labels are any nested structure of `torch.utils._pytree`. Tensors are cut along dimension 0; 0-dimensional
tensors and plain values go to every micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchround.library.refusals import PipelineUsageError
from torchround.library.seeds import layer_seed
from torchround.planning.partition import split_evenly

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class _Place:
    """A leaf that is the tensor of this number."""

    number: int


@dataclass(frozen=True)
class SampleBatch:
    """A micro-batch of `samples` samples: the tensors `parts`, and the facts that go with them.

    `structure` is `(inputs, labels)` with places for the tensors. `seed` is the pipeline's; `call` and `micro_batch` number
    the call and the micro-batch in it. `layer` is set for one layer. Without `loss_fn` the last layer's output is wanted.
    """

    parts: tuple[Tensor, ...]
    structure: Any
    samples: int
    loss_fn: LossFn | None
    is_training: bool
    seed: int
    call: int
    micro_batch: int
    layer: int = -1

    @property
    def shape(self) -> torch.Size:
        """The number of samples, then all other sizes of the tensors."""
        return torch.Size([self.samples, *(size for part in self.parts for size in part.shape[1:])])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that travel to each device."""
        return self.parts

    def rebuild(self) -> Callable[[Sequence[Tensor]], "SampleBatch"]:
        """Return a function that makes the same micro-batch from tensors on a device."""
        return partial(_with_parts, replace(self, parts=()))

    def for_layer(self, index: int) -> "SampleBatch":
        """Return the micro-batch that layer `index` gets."""
        return replace(self, layer=index)

    def for_training(self, loss_factor: float) -> "SampleBatch":
        """Return the same: a loss function of the user makes no gradients ahead."""
        return self

    def num_labels(self) -> int:
        """Return 1: losses are summed, never divided."""
        return 1

    def problem(self) -> str | None:
        """Return None: `cut` has checked the batch."""
        return None

    def inputs_and_labels(self) -> tuple[Any, Any]:
        """Return inputs and labels as the user gave them, for this micro-batch."""
        inputs, labels = pytree.tree_map_only(_Place, lambda place: self.parts[place.number], self.structure)
        return inputs, labels

    def layer_seed(self, offset: int = 0) -> int:
        """Return the seed of the layer's random numbers, or of the layer `offset` places on."""
        return layer_seed(self.seed, self.call, self.micro_batch, self.layer + offset)


def _with_parts(batch: SampleBatch, parts: Sequence[Tensor]) -> SampleBatch:
    return replace(batch, parts=tuple(parts))


def cut(
    inputs: Any,
    labels: Any,
    num_micro_batches: int,
    loss_fn: LossFn | None,
    *,
    is_training: bool,
    seed: int,
    call: int,
) -> list[SampleBatch]:
    """Cut a batch into at most `num_micro_batches` micro-batches, the first ones longer by one sample.

    Fewer samples make fewer micro-batches. Raises `PipelineUsageError` if the tensors do not fit together.
    """
    tensors = tensors_of((inputs, labels))
    numbers = iter(range(len(tensors)))
    structure = pytree.tree_map_only(Tensor, lambda _: _Place(next(numbers)), (inputs, labels))
    if any(tensor.requires_grad for tensor in tensors):
        raise PipelineUsageError(
            "a tensor of the batch requires a gradient, which would not be computed; detach it"
        )
    counts = sorted({len(tensor) for tensor in tensors if tensor.dim()})
    if len(counts) != 1 or not counts[0] or not any(leaf.dim() for leaf in tensors_of(inputs)):
        raise PipelineUsageError(
            f"tensors of the batch have {counts} samples along dimension 0, and inputs need one at least; give all tensors "
            "the same number. A tensor for all samples belongs in a buffer of the layer that uses it"
        )
    if num_micro_batches < 1:
        raise PipelineUsageError(f"num_micro_batches = {num_micro_batches}; legal: a whole number from 1 on")
    ranges = split_evenly(counts[0], min(num_micro_batches, counts[0]))
    batches = []
    for number, span in enumerate(ranges):
        parts = tuple(tensor[span.start : span.stop] if tensor.dim() else tensor for tensor in tensors)
        batches.append(
            SampleBatch(parts, structure, len(span), loss_fn, is_training, seed, call, micro_batch=number)
        )
    return batches


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nested structure."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """Join the outputs of micro-batches of so many samples each, leaf by leaf.

    Tensors whose dimension 0 is the number of samples are joined along it. Equal plain values are given once. Other
    leaves become lists, one entry for each micro-batch.
    """

    def joined_leaf(first: Any, *others: Any) -> Any:
        leaves = [first, *others]
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return first if all(leaf == first for leaf in others) else leaves
        fits = all(
            isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count
            for leaf, count in zip(leaves, samples, strict=True)
        )
        if not fits or {leaf.shape[1:] for leaf in leaves} != {first.shape[1:]}:
            return leaves
        return torch.cat(leaves) if others else first

    return pytree.tree_map(joined_leaf, *outputs)

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
    """A micro-batch of `samples` samples: the tensors of `(inputs, labels)`, and the facts that go with them.

    `leaves` are the leaves of that structure, with places in the stead of tensors. `seed` is the pipeline's; `call` and
    `micro_batch` number the call and the micro-batch in it. `layer` is set for one layer. Without `loss_fn` the last
    layer's output is wanted.
    """

    parts: tuple[Tensor, ...]
    structure: Any
    leaves: tuple[Any, ...]
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
        """Return what makes the same micro-batch from tensors on a device."""
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
        leaves = [self.parts[leaf.number] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        inputs, labels = pytree.tree_unflatten(leaves, self.structure)
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
    if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise PipelineUsageError(
            f"num_micro_batches = {num_micro_batches!r} must be a whole number from 1 on"
        )
    named, structure = pytree.tree_flatten_with_path((inputs, labels))
    places = [_leaf_name(path) for path, _ in named]
    values = [value for _, value in named]
    for place, value in zip(places, values, strict=True):
        if isinstance(value, Tensor) and (problem := _input_problem(value)):
            raise PipelineUsageError(f"{place} {problem}")
    samples = _count_samples(places, values)
    if not _leaves_of(inputs):
        raise PipelineUsageError("inputs hold no tensor with samples along dimension 0")
    batches = []
    ranges = split_evenly(samples, min(num_micro_batches, samples))
    for number, span in enumerate(ranges):
        parts: list[Tensor] = []
        leaves: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                leaves.append(_Place(len(parts)))
                parts.append(value[span.start : span.stop] if value.dim() else value)
            else:
                leaves.append(value)
        batches.append(
            SampleBatch(
                *(tuple(parts), structure, tuple(leaves), len(span), loss_fn, is_training, seed, call, number)
            )
        )
    return batches


def _leaves_of(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]


def _leaf_name(path: Any) -> str:
    """Return how messages name a leaf of `(inputs, labels)`."""
    return ("inputs", "labels")[path[0].idx] + pytree.keystr(path[1:])


def _input_problem(tensor: Tensor) -> str | None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return "is sparse, nested or quantised; give a dense tensor"
    if tensor.requires_grad:
        return "requires a gradient, which would not be computed; give it detached"
    return "is on meta and has no values" if tensor.is_meta else None


def _count_samples(places: Sequence[str], values: Sequence[Any]) -> int:
    """Return the size of dimension 0 that all tensors have in common."""
    counts = {
        place: value.shape[0]
        for place, value in zip(places, values, strict=True)
        if isinstance(value, Tensor) and value.dim()
    }
    if not counts:
        raise PipelineUsageError("inputs hold no tensor with samples along dimension 0")
    first, samples = next(iter(counts.items()))
    for place, count in counts.items():
        if count != samples:
            raise PipelineUsageError(
                f"{place} has {count} samples along dimension 0, {first} has {samples}; give all tensors the same "
                "number. A tensor for all samples belongs in a buffer of the layer that uses it"
            )
    if not samples:
        raise PipelineUsageError(f"{first} has no samples: its dimension 0 is 0")
    return samples


def joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """Join the outputs of micro-batches of so many samples each, leaf by leaf.

    Tensors whose dimension 0 is the number of samples are joined along it. Equal plain values are given once. Other
    leaves become lists, one entry for each micro-batch. Outputs of different structures come as one list.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        return list(outputs)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined_leaf(column, samples) for column in columns], structure)


def _joined_leaf(leaves: Sequence[Any], samples: Sequence[int]) -> Any:
    first = leaves[0]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        fits = all(leaf.dim() and len(leaf) == count for leaf, count in zip(leaves, samples, strict=True))
        alike = all(leaf.shape[1:] == first.shape[1:] and leaf.dtype == first.dtype for leaf in leaves)
        if fits and alike:
            return torch.cat(list(leaves)) if len(leaves) > 1 else first
        return list(leaves)
    if not any(isinstance(leaf, Tensor) for leaf in leaves) and all(leaf == first for leaf in leaves):
        return first
    return list(leaves)

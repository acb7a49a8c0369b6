"""Batches of samples: how inputs and labels are cut into micro-batches, and how outputs are joined again.

Inputs and labels are any nested structure of `torch.utils._pytree`. Tensors are cut along dimension 0; 0-dimensional
tensors and plain values go to every micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchround.engine.errors import EngineUsageError
from torchround.engine.worker.slots import Structure, flatten, unflatten
from torchround.library.seeds import layer_seed
from torchround.planning.partition import split_evenly

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class SampleBatch:
    """A micro-batch of `samples` samples: the tensors `parts`, and the facts that go with them.

    `structure` is that of `(inputs, labels)`. `seed` is the pipeline's; `call` and `micro_batch` number the call and the
    micro-batch in it. `layer` is set for one layer. Without `loss_fn` the last layer's output is wanted.
    """

    parts: tuple[Tensor, ...]
    structure: Structure
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
        return self.parts

    def rebuild(self) -> Callable[[Sequence[Tensor]], "SampleBatch"]:
        without = replace(self, parts=())
        return lambda parts: replace(without, parts=tuple(parts))

    def for_layer(self, index: int) -> "SampleBatch":
        return replace(self, layer=index)

    def for_training(self, loss_factor: float) -> "SampleBatch":
        return self  # a loss function of the user makes no gradients ahead

    def num_labels(self) -> int:
        return 1  # losses are summed, never divided

    def problem(self) -> str | None:
        return None  # `cut` has checked the batch

    def inputs_and_labels(self) -> tuple[Any, Any]:
        inputs, labels = unflatten(self.parts, self.structure)
        return inputs, labels

    def layer_seed(self, offset: int = 0) -> int:
        return layer_seed(self.seed, self.call, self.micro_batch, self.layer + offset)


def cut(
    inputs: Any, labels: Any, num_micro_batches: int, loss_fn: LossFn | None, **facts: Any
) -> list[SampleBatch]:
    """Cut a batch into at most `num_micro_batches` micro-batches, the first ones longer by one sample.

    Fewer samples make fewer micro-batches. `facts` are the other fields of `SampleBatch`. Raises `EngineUsageError` if the tensors do not fit together.
    """
    tensors, structure = flatten((inputs, labels))
    counts = {len(tensor) for tensor in tensors if tensor.dim()}
    is_constant = not any(tensor.requires_grad for tensor in tensors)
    if (
        len(counts) != 1
        or 0 in counts
        or not is_constant
        or not any(each.dim() for each in tensors_of(inputs))
    ):
        raise EngineUsageError(
            f"tensors of the batch have {sorted(counts)} samples along dimension 0; give all tensors the same number, at least "
            "one of them in the inputs, and detach them. A tensor for all samples belongs in a buffer of its layer"
        )
    [count] = counts
    batches = []
    for number, span in enumerate(split_evenly(count, min(num_micro_batches, count))):
        parts = tuple(tensor[span.start : span.stop] if tensor.dim() else tensor for tensor in tensors)
        batches.append(SampleBatch(parts, structure, len(span), loss_fn, micro_batch=number, **facts))
    return batches


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    """Join the outputs of micro-batches of so many samples each, leaf by leaf.

    Tensors whose dimension 0 is the number of samples are joined along it. Other leaves become lists, one entry for
    each micro-batch.
    """

    def joined_leaf(*leaves: Any) -> Any:
        pairs = zip(leaves, samples, strict=True)
        fit = all(isinstance(leaf, Tensor) and leaf.shape[:1] == (count,) for leaf, count in pairs)
        return torch.cat(leaves) if fit else list(leaves)

    return pytree.tree_map(joined_leaf, *outputs)

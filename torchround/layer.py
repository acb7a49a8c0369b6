"""The layer protocol: all that a model needs to know of torchround, and all that torchround knows of a model.

A model is an ordered list of layers (embedding, blocks, head). Each is an `nn.Module` built on the `meta`
device that holds parameters but no buffers; the engine binds the parameters to memory it owns. Weight decay is for
matrices: a module lists in `undecayed` the names of those parameters of its own that are stacks of vectors.

Shapes: B sequences of a micro-batch, T tokens of a sequence, D model width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100

Hidden = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class MicroBatch:
    """The integers of one micro-batch, uploaded once per device and round. All `[B, T]` int64.

    `labels[b, t]` is the token that position `t` is to predict (already shifted), or `IGNORED_LABEL`.
    `positions` restart at 0 with each document. `document_ids` are equal exactly where two tokens of a
    sequence belong to the same document; attention never crosses them.

    What the host knows besides goes along as plain numbers, so that no layer has to ask a device for it:
    `dropout_seed` is the one number that masks are made from, equal whenever the same layer runs on the same micro-batch
    of a step again; None is no dropout. `max_documents` bounds the documents of a sequence, each in one piece; it is a
    fact of the whole batch (`most_documents`), so that what a layer chooses by it does not depend on how the batch was
    cut. None: nobody counted. A layer that is being compiled gets 0-dimensional tensors in host memory in the place of
    a seed and of a bound above 1, so that its code serves all of them.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    document_ids: Tensor
    dropout_seed: int | Tensor | None = field(default=None, kw_only=True)
    max_documents: int | Tensor | None = field(default=None, kw_only=True)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in field order, as the engine packs and uploads them."""
        return (self.tokens, self.labels, self.positions, self.document_ids)

    def facts(self) -> dict[str, Any]:
        """What goes along with the tensors, by field name."""
        return {"dropout_seed": self.dropout_seed, "max_documents": self.max_documents}

    def with_tensors(self, tensors: Iterable[Tensor]) -> "MicroBatch":
        """The same facts with other tensors, in field order: elsewhere, or some of the sequences."""
        return MicroBatch(*tensors, **self.facts())

    def for_layer(self, index: int) -> "MicroBatch":
        """As layer `index` gets it: with a 63-bit dropout seed of its own."""
        if self.dropout_seed is None:
            return self
        assert isinstance(self.dropout_seed, int), "only what is compiled has tensors for facts"
        own = (self.dropout_seed * 0xD1342543DE82EF95 + index * 0xAF251AF3B0F025B5) % 2**63
        return replace(self, dropout_seed=own)

    def num_labels(self) -> int:
        """Labels that count towards the loss; summed over a step they are the loss divisor."""
        return int((self.labels != IGNORED_LABEL).sum())


def most_documents(document_ids: Tensor) -> int | None:
    """Documents of the sequence that has most, `MicroBatch.max_documents`; None where a document comes back.

    Reads the tensor, so it is for the host.
    """
    changes = document_ids[:, 1:] - document_ids[:, :-1]
    return None if (changes < 0).any() else 1 + int((changes != 0).sum(dim=1).max())


def with_dropout_seeds(micro_batches: Sequence[MicroBatch], seed: int, step: int) -> list[MicroBatch]:
    """The micro-batches of a training step, each with the number that its dropout masks are made from."""
    first = (seed * 2**40 + step) * 2**20  # no two steps of a run share a number
    return [replace(part, dropout_seed=first + index) for index, part in enumerate(micro_batches)]


@dataclass(frozen=True)
class LayerWork:
    """What one layer costs for one micro-batch, counted from shapes.

    `forward_flops` counts matrix products only (a multiply-add is 2), once per token that is computed.
    `activation_bytes` are kept between this layer's forward and its backward. `boundary_bytes` is the size
    of the layer's output. `workspace_bytes` is scratch alive only inside one call (a chunk of logits).
    `frozen_flops` are those of `forward_flops` that are products with frozen weights.
    """

    forward_flops: float
    activation_bytes: int
    boundary_bytes: int
    workspace_bytes: int = 0
    frozen_flops: float = 0.0

    @property
    def backward_flops(self) -> float:
        """Without recomputation: a product's two gradients cost a forward each; a frozen weight has none."""
        return 2 * self.forward_flops - self.frozen_flops


class Layer(Protocol):
    """What the engine asks of each layer. The object is also an `nn.Module`."""

    def __call__(self, hidden: Hidden | None, micro_batch: MicroBatch) -> Hidden:
        """`[B, T, D]` (or a flat tuple) in and out; the first layer gets `None`.

        The last layer returns the fp32 **sum** of its token losses, shape `[]`; it may leave out what is for training
        alone where gradients are disabled. All others compute the same either way.
        """
        ...

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill the layer's own parameters in place from `generator`. Tied ones are filled by their first user."""
        ...

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = "cuda") -> LayerWork:
        """Cost for a micro-batch of `batch` sequences of `tokens` tokens in a dtype of `element_bytes`.

        `device` is the kind that it runs on, `cuda` or `cpu`: what a layer keeps may depend on the kernels there.
        """
        ...


@dataclass(frozen=True)
class LayeredModel:
    """An ordered list of layers with a name for each, built on `meta`.

    A parameter that several layers share (the same `nn.Parameter` object) is tied: stored once, and each
    layer's gradient is added to it.
    """

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.layers):
            raise ValueError(f"{len(self.names)} names for {len(self.layers)} layers")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"layer names repeat: {self.names}")
        for name, layer in zip(self.names, self.layers, strict=True):
            buffers = [key for key, _ in layer.named_buffers()]
            if buffers:
                raise ValueError(f"layer {name} holds buffers {buffers}; a layer may only hold parameters")

    def stored_shapes(self) -> dict[str, torch.Size]:
        """Shape of each stored parameter, `<layer>.<path>`; a tied one under its first layer only."""
        shapes: dict[str, torch.Size] = {}
        seen: set[int] = set()
        for name, layer in zip(self.names, self.layers, strict=True):
            for path, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    shapes[f"{name}.{path}"] = parameter.shape
        return shapes


# Which parameters weight decay applies to.


def decayed_names(model: LayeredModel) -> frozenset[str]:
    """Names, as in `LayeredModel.stored_shapes`, of the parameters that decay.

    Those are matrices (projections, embeddings, experts). What only shifts or scales does not shrink what a layer can
    express, so the custom since GPT-2 is to leave it alone: vectors, and what a module lists in its attribute
    `undecayed` because it is a stack of them (one bias for each expert).
    """
    return frozenset(
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if parameter.ndim >= 2 and not _is_undecayed(layer, path)
    )


def _is_undecayed(layer: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in getattr(layer.get_submodule(owner), "undecayed", ())

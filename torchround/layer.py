"""The layer protocol: all that a model needs to know of torchround, and all that torchround knows of a model.

A model is an ordered list of layers (embedding, blocks, head). Each layer is an `nn.Module`. Its parameters are on the
`meta` device; the engine binds them to memory that the engine owns. Its buffers, if any, are constants.

The work of a layer has a file of its own, `layer_work.py`, which needs no torch.

Shapes: B sequences of a micro-batch, T tokens of a sequence, D model width.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from torchround.accelerators import PLANNED_KIND

# Parts of this protocol, which are imported from here.
from torchround.layer_work import KEEPABLE as KEEPABLE  # noqa: PLC0414
from torchround.layer_work import KeptWork as KeptWork  # noqa: PLC0414
from torchround.layer_work import LayerWork as LayerWork  # noqa: PLC0414
from torchround.layer_work import Products as Products  # noqa: PLC0414
from torchround.layer_work import aligned as aligned  # noqa: PLC0414
from torchround.packed_formats import PackedFormat

# The value between two layers: a tensor, or any nested structure of `torch.utils._pytree` whose leaves are tensors and
# plain values (`engine/worker/slots.py`).
Hidden = Any

# The tensor of a Hugging Face file that holds a parameter, or several tensors that are stacked along a new first
# dimension (one for each expert). In the nested form each entry of the stack is several tensors of one shape, joined along
# their first dimension (gate and up of an expert). Read one after the other, they are the parameter as it is in memory.
HFTensors = str | tuple[str, ...] | tuple[tuple[str, ...], ...]
# From `"<layer>.<parameter>"`, as the host store names a parameter, to its tensors.
HFNames = dict[str, HFTensors]


def names_in(tensors: HFTensors) -> tuple[str, ...]:
    """List the tensors of one parameter, in the order in which its memory holds them."""
    if isinstance(tensors, str):
        return (tensors,)
    return tuple(name for entry in tensors for name in ((entry,) if isinstance(entry, str) else entry))


def renamed(tensors: HFTensors, change: Callable[[str], str]) -> HFTensors:
    if isinstance(tensors, str):
        return change(tensors)
    changed = tuple(change(one) if isinstance(one, str) else tuple(map(change, one)) for one in tensors)
    return cast(HFTensors, changed)


def part_shape(tensors: HFTensors, shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(tensors, str):
        return tuple(shape)
    if isinstance(tensors[0], str):
        return tuple(shape[1:])
    return (shape[1] // len(tensors[0]), *shape[2:])


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A flat tensor that stays in a file, from byte `begin` of it on.

    `memory` maps the file, read-only. `descriptor` is the same file, open as long as `memory` lives; `path`
    is for messages, because another file may have that name by now.
    """

    memory: Tensor
    path: Path
    descriptor: int
    begin: int


IGNORED_LABEL = -100
KERNEL_BLOCK = 128  # tokens that a flash kernel takes at once
TENSORS = ("tokens", "labels", "positions", "document_ids")
FACTS = ("dropout_seed", "max_documents", "longest_document", "loss_factor", "wants", "cache")


class Batch(Protocol):
    """The interface that the engine needs from a micro-batch. `MicroBatch` is one; a library may have its own."""

    @property
    def shape(self) -> torch.Size:
        """The sizes that decide what buffers a pass needs: `[B, T]` of a `MicroBatch`."""

    def tensors(self) -> tuple[Tensor, ...]: ...

    def rebuild(self) -> Callable[[Sequence[Tensor]], "Batch"]:
        """Give a function that makes the same batch from the tensors on a device. It must not refer to this one's tensors."""

    def for_layer(self, index: int) -> "Batch": ...

    def for_training(self, loss_factor: float) -> "Batch":
        """Make the batch of a forward whose backward follows at once and multiplies the loss by `loss_factor`."""

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
        """Take what `make` gives, which the first layer that asks for `key` computes for all layers.

        For small tensors that follow from the integers and the model's settings. They live as long as the
        micro-batch, which on a device is until the next round. Not for a layer that is being compiled.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.labels, self.positions, self.document_ids)

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FACTS}

    def rebuild(self) -> Callable[[Iterable[Tensor]], "MicroBatch"]:
        facts = self.facts()
        return lambda tensors: MicroBatch(*tensors, **facts)

    def for_layer(self, index: int) -> "MicroBatch":
        """Make the micro-batch that layer `index` gets: the same, with a 63-bit dropout seed and a cache of its own."""
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
        for name, tensor in zip(TENSORS, self.tensors(), strict=True):
            if tensor.dtype != torch.int64 or tensor.dim() != 2 or tensor.shape != self.shape:
                return (
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; "
                    f"expected int64 [B, T] like tokens {tuple(self.shape)}"
                )
        return None


def most_documents(document_ids: Tensor) -> int | None:
    """Count the documents of each sequence of `[B, T]` and return the largest count, for `max_documents`.

    Return None if a document appears in two pieces. Reads the tensor, so it is for host memory.
    """
    changes = document_ids[:, 1:] - document_ids[:, :-1]
    # Ids grow along a sequence; a smaller id after a larger one is a document that comes back.
    return None if (changes < 0).any() else 1 + int((changes != 0).sum(dim=1).max())


def longest_document(document_ids: Tensor) -> int:
    """Compute a bound on the tokens of a document of `[B, T]`, in whole blocks of attention kernels. For host memory."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    longest = int(torch.diff(starts, append=starts.new_tensor([begins.numel()])).max())
    return min(longest + -longest % KERNEL_BLOCK, document_ids.shape[1])


def with_dropout_seeds(
    micro_batches: Sequence[MicroBatch], seed: int, step: int, numbers: Sequence[int] | None = None
) -> list[MicroBatch]:
    """Give each micro-batch of a step the number of its dropout masks. `numbers` are theirs in the step, if not all."""
    first = (seed * 2**40 + step) * 2**20  # room for 2^20 micro-batches: no two steps of a run share a number
    numbers = range(len(micro_batches)) if numbers is None else numbers
    return [replace(m, dropout_seed=first + n) for m, n in zip(micro_batches, numbers, strict=True)]


class Layer(Protocol):
    """The interface that the engine needs from each layer. The object is also an `nn.Module`.

    A layer may name expensive parts by `torchround.keeping.keep`, so that its recomputation can skip them. It then counts
    them in `LayerWork.keepable`. The engine looks for these optional attributes:

    - `undecayed`, of any module: names of its own parameters that have two or more dimensions only because they are stacks
      of vectors. Weight decay is for matrices.
    - `never_compiled`: True if the layer is not compiled. `most_compiled_tokens`: the most tokens of a micro-batch for which it is.
    - `code()`: what is compiled in the layer's place, a module of the same parameters and without buffers. It is called with
      the tensors of `code_inputs(hidden, micro_batch)` and the micro-batch. Its attribute `differentiable` says how many of
      these get gradients; without it, each floating one does.
    - `init_adapters(generator)`: fills the parameters that a file of the layer's base lacks.
    - `new_cache(capacity)`: makes what the layer gets as `MicroBatch.cache`, its memory of up to `capacity` tokens of each
      text, with a method `clear`. `cache_bytes(batch, tokens, element_bytes)` counts it. If a layer between the first and
      the last lacks them, each token that is generated reads the whole text again.
    - `longest`: the most tokens of a sequence that the layer is right for, or None.
    """

    def __call__(self, hidden: Hidden | None, micro_batch: MicroBatch) -> Hidden:
        """Map `[B, T, D]` (or a flat tuple of tensors) to the same; the first layer gets `None`.

        The last layer returns the fp32 **sum** of its token losses, shape `[]`. While gradients are disabled it may
        leave out terms that only training needs. Every other layer computes the same either way.
        """

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill the layer's own parameters in place from `generator`. The first layer that has a tied one fills it."""
        ...

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count the cost of `batch` sequences of `tokens` tokens in a dtype of `element_bytes`.

        `device` is the kind of device, `cpu` or an accelerator's: the memory that a layer keeps may depend on the
        kernels there.
        """


def has_code(layer: nn.Module) -> bool:
    return hasattr(layer, "code") and not getattr(layer, "never_compiled", False)


def may_compile(layer: nn.Module, num_tokens: int = 0) -> bool:
    """Check whether a layer may be compiled for a micro-batch of this size. Without a size: for small ones.

    The head is not, nor is a block that computes in chunks of tokens. They add to their weights' gradients themselves, which
    compiled code cannot.
    """
    if getattr(layer, "never_compiled", False):
        return False
    most: int = getattr(layer, "most_compiled_tokens", num_tokens)
    return num_tokens <= most


@dataclass(frozen=True)
class LayeredModel:
    """An ordered list of layers with a name for each. Parameters are on `meta`, buffers are real and constant.

    A parameter that several layers share (the same `nn.Parameter` object) is tied: stored once, and each
    layer's gradient is added to it. Each device has its own copy of the buffers, which no layer may change. Raises
    `ValueError` for names that repeat, and for buffers on `meta`.

    - `own_dtypes`: by stored name, the dtype in which a parameter computes if that is not the store's.
    - `packed`: by stored name, the format of frozen matrices that the store holds packed and a device unpacks.
    """

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    own_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict, kw_only=True)
    packed: Mapping[str, PackedFormat] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"layer names repeat: {self.names}")
        for name, layer in zip(self.names, self.layers, strict=True):
            if lacking := [path for path, buffer in layer.named_buffers() if buffer.is_meta]:
                raise ValueError(
                    f"layer {name}: its buffers {lacking} are on `meta`, without values; make them real"
                )

    def constant_bytes(self) -> int:
        buffers = {id(buffer): buffer for layer in self.layers for buffer in layer.buffers()}
        return sum(aligned(part.nbytes) for part in buffers.values())

    def stored_shapes(self) -> dict[str, torch.Size]:
        """Find the shape of each stored parameter, `<layer>.<path>`; a tied one under its first layer only."""
        first: dict[int, tuple[str, torch.Size]] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            for path, parameter in layer.named_parameters():
                first.setdefault(id(parameter), (f"{name}.{path}", parameter.shape))
        return dict(first.values())


def decayed_names(model: LayeredModel) -> frozenset[str]:
    """List the names, as in `LayeredModel.stored_shapes`, of the parameters that weight decay applies to.

    These are the matrices, and stacks of them: projections, embeddings, experts. Vectors only shift or scale, so shrinking
    them would not simplify the model; leaving them alone is the custom since GPT-2. A module's `undecayed` parameters count
    as vectors.
    """
    names = set()
    for name, layer in zip(model.names, model.layers, strict=True):
        for path, parameter in layer.named_parameters():
            owner, _, key = path.rpartition(".")
            if parameter.ndim >= 2 and key not in getattr(layer.get_submodule(owner), "undecayed", ()):
                names.add(f"{name}.{path}")
    return frozenset(names)

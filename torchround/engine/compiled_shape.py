"""Layers of one kind compiled for one shape: forward, backward, and what is kept so that the forward need not run again.

A compiled layer keeps everything that its compiled forward returns: its output, and all tensors that its compiled backward
reads. One piece of code makes them together, so a compiled layer keeps all or nothing. The same compiled backward reads
them, whichever call made them, so results have the same bits by construction.

Some returned tensors are inputs, such as weights, or views of inputs. These stay where they are, and `ReturnedTensor`
notes which input it is. Others share memory with each other, for example query, key and value cut from one product. Such
memory is kept once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchround import keeping
from torchround.engine.worker.slots import FLAT, SINGLE, as_hidden, flatten
from torchround.layer import KEEPABLE, Hidden, MicroBatch
from torchround.optim.kernel import keep_inductor_private


class CompiledShape:
    """A kind compiled for one shape. `wants` says which parameters and inputs get gradients."""

    def __init__(self, function: Callable[..., Hidden], wants: Sequence[bool], backend: str) -> None:
        options = None
        if backend == "inductor":
            keep_inductor_private()
            options = _deterministic_options()
        self._compiled = torch.compile(
            function, fullgraph=True, dynamic=False, backend=backend, options=options
        )
        self._wants = wants

    def __call__(self, micro_batch: MicroBatch, tensors: list[Tensor]) -> Hidden:
        outputs = _Run.apply(self, micro_batch, *tensors)
        return as_hidden(outputs, self._single)

    def rehearse(self, micro_batch: MicroBatch, tensors: list[Tensor]) -> None:
        """Run forward and backward once, so that both are compiled, and drop the results."""
        # A recording under way must not get the tensors of a rehearsal.
        with keeping.suspended():
            inner, outputs = self.forward(micro_batch, tensors)
            if _put_in_front(outputs):
                # Once more, so that the new part sees what the code returns: on this device the first call may be one
                # that replays.
                del inner, outputs
                inner, outputs = self.forward(micro_batch, tensors)
            self.backward(inner, outputs, [torch.zeros_like(output) for output in outputs])

    def forward(
        self, micro_batch: MicroBatch, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Return leaves in the place of `tensors`, and the outputs computed from them."""
        inner = [_leaf(tensor, wanted) for tensor, wanted in zip(tensors, self._wants, strict=True)]
        with torch.set_grad_enabled(any(self._wants)):
            output = self._compiled(inner, micro_batch.tensors(), micro_batch.facts())
        outputs, structure = flatten(output)
        if structure not in (SINGLE, FLAT):
            raise TypeError("it returns a nested value; compiled code returns a tensor or a tuple of tensors")
        # Device threads share this object; every one of them writes the same value here.
        self._single = structure is SINGLE
        return inner, outputs

    def backward(
        self, inner: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return a gradient for each leaf of `inner`, None for a leaf without one."""
        pairs = [
            (output, grad) for output, grad in zip(outputs, gradients, strict=True) if output.requires_grad
        ]
        wanted = [leaf for leaf in inner if leaf.requires_grad]
        if not pairs or not wanted:
            return [None] * len(inner)
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True
            )
        )
        return [next(found) if leaf.requires_grad else None for leaf in inner]


class _Run(torch.autograd.Function):
    """The step from the caller's autograd graph into compiled code and back.

    It keeps the caller's leaves, which may hold gradients already, out of what is compiled.
    """

    @staticmethod
    def forward(
        ctx: Any, shape: CompiledShape, micro_batch: MicroBatch, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inner, outputs = shape.forward(micro_batch, tensors)
        ctx.shape, ctx.inner, ctx.outputs = shape, inner, outputs
        ctx.totals = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        found = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(output for output in found if not output.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner, outputs, totals = ctx.inner, ctx.outputs, ctx.totals
        ctx.inner = ctx.outputs = ctx.totals = None  # the activations that they keep are of no more use
        found = ctx.shape.backward(inner, outputs, grads)
        return None, None, *(_added(grad, total) for grad, total in zip(found, totals, strict=True))


def _added(grad: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Add a gradient to the sum of another number format that its leaf holds, and return what is left for autograd.

    Autograd would cast the gradient in a pass of its own. The sum has the same bits: the cast is exact.
    """
    if grad is None or total is None or total.dtype == grad.dtype or total.dtype != torch.float32:
        return grad
    total.add_(grad)
    return None


def _leaf(tensor: Tensor, wanted: bool) -> Tensor:
    """Return the same memory as a leaf of its own."""
    return tensor.detach().requires_grad_(wanted)


def _deterministic_options() -> dict[str, Any]:
    """Return options with which equal runs give equal bits.

    Inductor then does not choose by measured times how sums add up. Code for virtual devices has one thread, because it
    splits sums by threads, and the number of the thread that compiles would be in the cached code.
    """
    options = {"deterministic": True, "cpp.threads": 1}
    return {name: value for name, value in options.items() if name in torch._inductor.list_options()}


# What a compiled layer keeps.


@dataclass(frozen=True)
class ReturnedTensor:
    """One tensor that a compiled forward returns, as a part of an input or of a piece of kept memory.

    `source` is a position: inputs come first, then pieces of kept memory. `offset` is the first element, counted from the
    beginning of the input or of the piece.
    """

    source: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view_of(self, source: Tensor) -> Tensor:
        """Return the tensor as a view of its source, or the source itself if it is the whole of it."""
        if source.dtype != self.dtype:
            size = self.dtype.itemsize
            source = source[: source.nbytes // size * size].view(self.dtype)
        elif source.shape == self.shape and source.stride() == self.stride:
            return source
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


@dataclass(frozen=True)
class ReturnedValues:
    """How to rebuild what a compiled forward returns. It is the same for each call, because the code is.

    `values` has a `ReturnedTensor` for each tensor and the value itself for everything else. `sizes` are the bytes of the
    pieces of kept memory.
    """

    values: tuple[Any, ...]
    sizes: tuple[int, ...]

    def rebuild(self, inputs: Sequence[Any], memory: Sequence[Tensor]) -> list[Any]:
        """Return the values for these inputs and this kept memory, flat uint8 tensors.

        Raises `KeptActivationError` for memory of other sizes.
        """
        found = tuple(piece.nbytes for piece in memory)
        if found != self.sizes:
            raise keeping.KeptActivationError(
                f"a compiled layer got kept tensors of {found} bytes; its code returns {self.sizes}"
            )
        sources = [*inputs, *memory]
        return [
            value.view_of(sources[value.source]) if isinstance(value, ReturnedTensor) else value
            for value in self.values
        ]


class KeptForward:
    """A part in front of the code of a compiled forward, which can record what the code returns and return it again."""

    def __init__(self, code: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._code = code
        self._values: ReturnedValues | None = None  # from the second call of the rehearsal on
        self._boxed_call = True  # PyTorch then gives the inputs as one list, which the code may empty

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the code, or return what it returned before if this thread replays."""
        record, memory = keeping.whole_record(KEEPABLE), keeping.whole_replay()
        if memory:
            assert self._values is not None, "the rehearsal comes first, and does not replay"
            return self._values.rebuild(inputs, memory)
        if record is None and self._values is not None:
            return self._code(inputs)
        given = list(inputs)
        returned = self._code(inputs)
        values, memory = _split(given, returned)
        if self._values is None:
            self._values = values
        # Other values than before are not kept; then the layer is recomputed, which is right in any case.
        elif record is not None and values == self._values:
            record.tensors.extend(memory)
        return returned


def _put_in_front(outputs: Sequence[Tensor]) -> bool:
    """Put a `KeptForward` in front of the compiled code that made these outputs. Return whether it was not there before.

    The code is an attribute of the autograd function that PyTorch made for it, also if the code comes from the compiler's
    cache. A compiler without such a function keeps nothing.
    """
    for output in outputs:
        function = getattr(type(output.grad_fn), "_forward_cls", None)
        code = getattr(function, "compiled_fw", None)
        if code is not None and not isinstance(code, KeptForward):
            setattr(function, "compiled_fw", KeptForward(code))  # noqa: B010  (unknown to the type checker)
            return True
    return False


def _split(inputs: Sequence[Any], returned: Sequence[Any]) -> tuple[ReturnedValues, list[Tensor]]:
    """Return how the returned values are rebuilt, and the memory to keep for that: flat uint8 tensors."""
    places = [_place(value) if isinstance(value, Tensor) else (0, 0) for value in inputs]
    pieces: dict[int, Tensor] = {}  # by the address where a storage begins
    values: list[Any] = []
    for value in returned:
        if not isinstance(value, Tensor):
            values.append(value)
            continue
        start, stop = _place(value)
        # By addresses and not by storages: the storage of each weight is the slot that holds the whole stage.
        holders = [
            index
            for index, (begin, end) in enumerate(places)
            if begin <= start < stop <= end and inputs[index].dtype == value.dtype
        ]
        if holders:
            source, begin = holders[0], places[holders[0]][0]
        else:
            begin = value.untyped_storage().data_ptr()
            if begin not in pieces or pieces[begin].nbytes < stop - begin:
                pieces[begin] = _first_bytes(value, stop - begin)
            source = len(inputs) + list(pieces).index(begin)
        offset = (start - begin) // value.itemsize
        values.append(ReturnedTensor(source, value.dtype, value.shape, value.stride(), offset))
    return ReturnedValues(tuple(values), tuple(piece.nbytes for piece in pieces.values())), [*pieces.values()]


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the one behind its last byte."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _first_bytes(tensor: Tensor, nbytes: int) -> Tensor:
    """Return the first bytes of the storage of a tensor as flat uint8."""
    return tensor.detach().as_strided((nbytes // tensor.itemsize,), (1,), 0).view(torch.uint8)

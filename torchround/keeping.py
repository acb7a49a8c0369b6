"""Parts of a layer whose results are kept in the forward, so that the recomputation of the layer skips them.

Layer code names its expensive parts: `keep("qkv", function, *args)`. A forward stage runs the layer in `recording`, which
collects the results of the products and attention kernels inside the named parts. The backward stage runs the layer in
`replaying` with the collected tensors. Each of these operations then returns its collected result and computes nothing.

The operations are intercepted below autograd. Everything above is as in training: graphs, backward formulas, functions
with a backward of their own, adapters. So gradients are bit for bit those of a full recomputation by construction.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

Result = TypeVar("Result")

# Products whose results are kept, and the place of the first matrix among their arguments; the second follows it.
PRODUCTS: Mapping[str, int] = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_grouped_mm": 0,
    "torchround::grouped_rows": 0,
    "torchround::grouped_product": 0,
    "torchround::packed_product": 0,
}
# An order of dimensions in memory, which is its own inverse; None is the usual one.
Order = tuple[int, ...] | None
# `[B, H, T, C]` is stored as `[B, T, H, C]`. T of the fp32 log-sum-exp behind it may be padded.
_HEADS_INSIDE: tuple[Order, ...] = ((0, 2, 1, 3), None)
# Attention kernels, and the order of each of their first results, which are kept. No caller uses dropout in a kernel, so the
# state of random numbers behind them is never read.
ATTENTION_KERNELS: Mapping[str, tuple[Order, ...]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": ((0, 2, 1, 3), (0, 2, 1)),
    "aten::_scaled_dot_product_flash_attention": _HEADS_INSIDE,
    "aten::_scaled_dot_product_efficient_attention": _HEADS_INSIDE,
    "aten::_scaled_dot_product_cudnn_attention": _HEADS_INSIDE,
    "aten::_scaled_dot_product_fused_attention_overrideable": _HEADS_INSIDE,
    "aten::_flash_attention_forward": (None, None),
}


class KeptActivationError(RuntimeError):
    """Kept activations that do not fit the layer that is recomputed from them."""


@dataclass
class ActivationRecord:
    """The results that one run of a layer has collected, in the order of the operations.

    All are contiguous and without a graph. They are the layer's own memory: nothing may write into them. `parts` has the
    name of each one's part.
    """

    tensors: list[Tensor] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)


def keep(name: str, function: Callable[..., Result], *args: Any) -> Result:
    """Call `function(*args)`, the part `name` of a layer, one of `KEEPABLE`.

    The result is a tensor or a flat tuple of tensors. Nothing outside of `function` may write into the results of its
    products, because a replay returns the same memory again.
    """
    if torch.compiler.is_dynamo_compiling():
        return function(*args)
    active = _thread.active
    if active is None or name not in active.names:
        return function(*args)
    return cast(Result, active.run(name, function, args))


def current_part() -> str:
    """Return the name of the part that this thread records or replays now, "" outside of one."""
    return "" if _thread.mode is None else _thread.mode.part


def passing(function: Callable[..., Result], *args: Any) -> Result:
    """Call `function(*args)`, whose result only the next `joined` of the part reads: it is not kept.

    A replay leaves its memory as it is.
    """
    mode = None if torch.compiler.is_dynamo_compiling() else _thread.mode
    if mode is None:
        return function(*args)
    before, mode.passes = mode.passes, True
    try:
        return function(*args)
    finally:
        mode.passes = before


def joined(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Join results of `passing` in one operation, whose result is kept in their place, except inside another `passing`."""
    mode = None if torch.compiler.is_dynamo_compiling() else _thread.mode
    if mode is None:
        return function(*args)
    mode.joins = True
    result = function(*args)
    assert not mode.joins, "one operation joins the parts"
    return result


def recording(names: Iterable[str]) -> AbstractContextManager[ActivationRecord]:
    """Collect the results of the parts `names` of the layer that runs inside, on this thread.

    The parts run with gradients enabled, so that they take the very kernels of training; their results have no graph.
    Raises `KeptActivationError` at the end if the layer wrote into a collected tensor.
    """
    mode = _Recording(names)
    return _parts_run_by(mode, mode.record)


def replaying(names: Iterable[str], tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let the layer that runs inside, on this thread, take the results of its parts `names` from a record's `tensors`.

    `tensors` must stay as they are until the backward of the layer has ended. Raises `KeptActivationError` if the layer's
    operations take more of them than there are, or fewer.
    """
    return _parts_run_by(_Replaying(names, tensors), None)


def whole_record(names: Iterable[str]) -> ActivationRecord | None:
    """Find this thread's record if it has all these parts; a layer of one piece fills it whole, or is recomputed."""
    active = _thread.active
    return active.record if isinstance(active, _Recording) and active.names.issuperset(names) else None


def whole_replay() -> Sequence[Tensor]:
    """Take all tensors that this thread replays, for a layer that is one piece of code; () without a replay."""
    active = _thread.active
    return active.take_all() if isinstance(active, _Replaying) else ()


def rest_of_replay() -> Callable[[], AbstractContextManager[None]]:
    """Take all tensors that this thread has left to replay. Return a context that replays them each time it is entered.

    For the last parts of a layer, if they run more than once. Without a replay the context changes nothing.
    """
    active = _thread.active
    if not isinstance(active, _Replaying):
        return nullcontext
    names, tensors = active.names, active.take_all()

    @contextmanager
    def replayed() -> Iterator[None]:
        with suspended(), replaying(names, tensors):
            yield

    return replayed


@contextmanager
def without_output() -> Iterator[None]:
    """Run layers inside for their graphs alone: no value of their outputs is read."""
    _thread.reads_output = False
    try:
        yield
    finally:
        _thread.reads_output = True


def output_is_read() -> bool:
    """Check whether something reads the output of the layer that runs now."""
    return torch.compiler.is_dynamo_compiling() or _thread.reads_output


@contextmanager
def suspended() -> Iterator[None]:
    """Run layers inside as if this thread had no recording and no replay."""
    before, _thread.active = _thread.active, None
    try:
        yield
    finally:
        _thread.active = before


class _Thread(threading.local):
    # The mode of the recording or replay that runs, and the same while a part of it runs.
    active: "_PartMode | None" = None
    mode: "_PartMode | None" = None
    reads_output: bool = True


_thread = _Thread()


@contextmanager
def _parts_run_by(mode: "_PartMode", result: Result) -> Iterator[Result]:
    assert _thread.active is None, "a layer runs in one recording or replay at a time"
    _thread.active = mode
    try:
        yield result
        mode.check()
    except BaseException:
        mode.forget()  # the traceback keeps this object
        raise
    finally:
        _thread.active = None


class _PartMode(TorchDispatchMode):
    """Mode that intercepts operations of named parts, below autograd. `joins` lasts until a `joined` operation is seen."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)
        self.of("")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise PyTorch wraps `__torch_dispatch__`, a third of its time. Compiled code does not run inside of a mode.
        return False

    def __enter__(self) -> Any:
        assert _thread.mode is None, "named parts do not contain each other"
        _thread.mode = self
        # PyTorch's own method also sets flags of the whole process, and restores them at the end. Device threads that take
        # turns at that would leave them set for ever, and PyTorch reads them when it compiles.
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()
        _thread.mode = None

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a part as the recomputation before a backward does. PyTorch may choose other kernels without gradients."""
        with torch.enable_grad(), self.of(name):
            # The same memory as the beginning of a graph, as in the recomputation.
            leaves = (
                arg.detach().requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg
                for arg in args
            )
            found = function(*leaves)
        return tuple(tensor.detach() for tensor in found) if isinstance(found, tuple) else found.detach()

    def of(self, name: str) -> "_PartMode":
        self.passes = self.joins = False
        self.part = name
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.joins:
            self.joins = False
            return func(*args, **kwargs) if self.passes else self.collected(func, args, kwargs, (None,))
        # PyTorch may compute attention by products of all pairs. Their results, of size T^2, are not worth the link.
        if self.part == "attention":
            orders = ATTENTION_KERNELS.get(func.name())
        else:
            orders = (None,) if func.name() in PRODUCTS else None
        if orders is None:
            return self.other(func, args, kwargs)
        if self.passes:
            return self.passed(func, args, kwargs)
        return self.collected(func, args, kwargs, orders)

    collected: Callable[..., Any]  # both modes have one of their own

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    # Handles a product whose result is not kept because only a joined one reads it.
    passed = other

    def check(self) -> None:
        """Raise `KeptActivationError` at the end if the layer did not run as expected."""

    def forget(self) -> None:
        """Drop the tensors."""


class _Recording(_PartMode):
    """Mode that computes every operation, and collects the results that are kept."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.record = ActivationRecord()
        self._outputs: list[Tensor] = []

    def forget(self) -> None:
        self.record.tensors.clear()
        self._outputs.clear()

    def collected(self, func: Any, args: Any, kwargs: Any, orders: Sequence[Order]) -> Any:
        found = func(*args, **kwargs)
        # The outputs behind those with an order are not kept.
        for output, order in zip(found if isinstance(found, tuple) else (found,), orders, strict=False):
            self.record.tensors.append(_in_order(output, order).contiguous())
            self.record.parts.append(self.part)
            self._outputs.append(output)
        return found

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        # A linear layer views its product in this way: the same memory with a counter of writes of its own.
        if func is torch.ops.aten._unsafe_view.default and any(output is args[0] for output in self._outputs):
            self._outputs.append(found)
        return found

    def check(self) -> None:
        # Views and detached tensors share the counter of writes.
        if any(output._version for output in self._outputs):
            raise KeptActivationError("the layer writes into its own kept activation")


class _Replaying(_PartMode):
    """Mode that returns kept tensors instead of running the operations that made them."""

    def __init__(self, names: Iterable[str], tensors: Sequence[Tensor]) -> None:
        super().__init__(names)
        self._tensors = tensors
        self._next = 0

    def run(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():  # the first of two recomputations, with `recompute = "layer"`
            return super().run(name, function, args)
        with self.of(name):
            return function(*args)

    def forget(self) -> None:
        self._tensors = ()

    def collected(self, func: Any, args: Any, kwargs: Any, orders: Sequence[Order]) -> Any:
        kept = self._tensors[self._next : self._next + len(orders)]
        self._next += len(orders)
        if len(kept) < len(orders):
            raise KeptActivationError(
                f"{func.name()} needs kept activation number {self._next}, and only {len(self._tensors)} were kept"
            )
        # Other tensors of the same memory: autograd makes these ones nodes of a graph.
        found = [_in_order(one, order) for one, order in zip(kept, orders, strict=True)]
        returned = func._schema.returns
        if len(returned) == 1:
            return found[0]
        return (*found, *(_unused_result(result.name, args) for result in returned[len(found) :]))

    def passed(self, func: Any, args: Any, kwargs: Any) -> Any:
        left, right = args[PRODUCTS[func.name()] :][:2]
        return left.new_empty((*left.shape[:-1], right.shape[-1]))

    def take_all(self) -> Sequence[Tensor]:
        left, self._next = self._tensors[self._next :], len(self._tensors)
        return left

    def check(self) -> None:
        if self._next < len(self._tensors):
            raise KeptActivationError(
                f"the layer took {self._next} of its {len(self._tensors)} kept activations in its recomputation"
            )


def _in_order(tensor: Tensor, order: Order) -> Tensor:
    return tensor.detach() if order is None else tensor.permute(order)


def _unused_result(name: str, args: tuple[Any, ...]) -> Tensor | int | None:
    """Make a result of an attention kernel that is not kept, by its name in PyTorch's schema."""
    query, key = args[:2]
    if name.startswith("max_"):
        return cast(int, (query if name == "max_q" else key).shape[-2])
    if name.startswith("cum_seq"):  # the lengths of nested sequences, which no layer has
        return None
    # Random state and a mask for debugging. No backward reads them without dropout.
    is_pair = name == "rng_state"
    return query.new_zeros(2 if is_pair else (), dtype=torch.uint64 if is_pair else torch.int64)

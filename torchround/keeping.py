"""Parts of a layer whose results are kept in the forward, so that the recomputation of the layer skips them.

Layer code names its expensive parts: `keep("qkv", function, *args)`. A forward stage runs the layer in `recording`, which
collects the results of the products and attention kernels inside the named parts. The backward stage runs the layer in
`replaying` with the collected tensors. Each of these operations then returns its collected result and computes nothing.

The operations are intercepted below autograd. Everything above is as in training: graphs, backward formulas, functions
with a backward of their own, adapters. So gradients are bit for bit those of a full recomputation by construction.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from torchround.kept_operations import ATTENTION_KERNELS, PRODUCTS, CollectedResult, Results, unused_result

Result = TypeVar("Result")


class KeptActivationError(RuntimeError):
    """Kept activations that do not fit the layer that is recomputed from them."""


@dataclass
class ActivationRecord:
    """The results that one run of a layer has collected, in the order of the operations.

    All are contiguous and without a graph. They are the layer's own memory: nothing may write into them.
    """

    tensors: list[Tensor] = field(default_factory=list)


def keep(name: str, function: Callable[..., Result], *args: Any) -> Result:
    """Return `function(*args)`, the part `name` of a layer, one of `KEEPABLE`.

    The result is a tensor or a flat tuple of tensors. Nothing outside of `function` may write into the results of its
    products, because a replay returns the same memory again.
    """
    if torch.compiler.is_dynamo_compiling():
        return function(*args)
    active = _thread.active
    if active is None or name not in active.names:
        return function(*args)
    return cast(Result, active.run(name, function, args))


def passing(function: Callable[..., Result], *args: Any) -> Result:
    """Return `function(*args)`, whose values only the next `joined` of the same part reads.

    They are not kept. A replay leaves the memory of its products as it is.
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
    """Return `function(*args)`, one operation that joins what `passing` made. Its result is kept in their place.

    Inside of another `passing` it is not kept either.
    """
    mode = None if torch.compiler.is_dynamo_compiling() else _thread.mode
    if mode is None:
        return function(*args)
    mode.joins = True
    result = function(*args)
    assert not mode.joins, "one operation joins the parts"
    return result


@contextmanager
def recording(names: Iterable[str]) -> Iterator[ActivationRecord]:
    """Collect the results of the parts `names` of the layer that runs inside, on this thread.

    The parts run with gradients enabled, so that they take the very kernels of training; their results have no graph.
    Raises `KeptActivationError` at the end if the layer wrote into a collected tensor.
    """
    record = ActivationRecord()
    mode = _Recording(names, record)
    try:
        with _parts_run_by(mode):
            yield record
        mode.check_untouched()
    except BaseException:
        record.tensors.clear()
        raise
    finally:
        mode.forget()


@contextmanager
def replaying(names: Iterable[str], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let the layer that runs inside, on this thread, take the results of its parts `names` from a record's `tensors`.

    `tensors` must stay as they are until the backward of the layer has ended. Raises `KeptActivationError` for tensors that
    are not those of this layer's operations.
    """
    mode = _Replaying(names, tensors)
    try:
        with _parts_run_by(mode):
            yield
        mode.check_used_up()
    finally:
        mode.forget()


def whole_record(names: Iterable[str]) -> ActivationRecord | None:
    """Return the record of this thread if it records all these parts: a layer of one piece of code fills it as a whole.

    Such a layer may leave it empty, and is then recomputed.
    """
    active = _thread.active
    return active.record if isinstance(active, _Recording) and active.names.issuperset(names) else None


def whole_replay() -> Sequence[Tensor]:
    """Return and take all tensors that this thread replays, for a layer that is one piece of code; () without a replay."""
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
    """Return whether something reads the output of the layer that runs now."""
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
def _parts_run_by(mode: "_PartMode") -> Iterator[None]:
    assert _thread.active is None, "a layer runs in one recording or replay at a time"
    _thread.active = mode
    try:
        yield
    finally:
        _thread.active = None


def _as_leaf(value: Any) -> Any:
    """Return the same memory as the beginning of a graph, as in the recomputation."""
    is_wanted = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_wanted else value


class _PartMode(TorchDispatchMode):
    """Intercept the operations of named parts, below autograd.

    `passes` is true inside of `passing`, `joins` until the operation of a `joined` has been seen.
    """

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
            found = function(*map(_as_leaf, args))
        return tuple(tensor.detach() for tensor in found) if isinstance(found, tuple) else found.detach()

    def of(self, name: str) -> "_PartMode":
        """Return this mode, ready for the part `name`."""
        self.passes = self.joins = False
        # PyTorch may compute attention by products of all pairs. Their results, of size T^2, are not worth the link.
        self._operations = ATTENTION_KERNELS if name == "attention" else PRODUCTS
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.joins:
            self.joins = False
            return func(*args, **kwargs) if self.passes else self.collected(func, args, kwargs, None)
        described = self._operations.get(func.name())
        if described is None:
            return self.other(func, args, kwargs)
        results = described(*args)
        if self.passes:
            return self.passed(func, args, kwargs, results)
        return self.collected(func, args, kwargs, results)

    def collected(self, func: Any, args: Any, kwargs: Any, results: Results | None) -> Any:
        """Handle an operation whose results are kept; None stands for a lone result of unknown shape."""
        raise AssertionError("both modes have one of their own")

    def passed(self, func: Any, args: Any, kwargs: Any, results: Results) -> Any:
        """Handle an operation whose results are not kept because only a joined one reads them."""
        return func(*args, **kwargs)

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class _Recording(_PartMode):
    """Compute every operation, and collect the results that are kept."""

    def __init__(self, names: Iterable[str], record: ActivationRecord) -> None:
        super().__init__(names)
        self.record = record
        self._found: list[tuple[Any, Tensor]] = []

    def forget(self) -> None:
        """Drop the tensors: after a fault its traceback keeps this object."""
        self._found.clear()

    def collected(self, func: Any, args: Any, kwargs: Any, results: Results | None) -> Any:
        found = func(*args, **kwargs)
        outputs = found if isinstance(found, tuple) else (found,)
        # The outputs behind the described ones are not kept.
        for output, result in zip(outputs, results or (CollectedResult(),), strict=False):
            self.record.tensors.append(result.in_memory_order(output))
            self._found.append((func, output))
        return found

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        # A linear layer views its product in this way: the same memory with a counter of writes of its own.
        if func is torch.ops.aten._unsafe_view.default:
            self._found += [(product, found) for product, output in self._found if output is args[0]]
        return found

    def check_untouched(self) -> None:
        """Check that no operation of the layer has written into what was collected."""
        # Views and detached tensors share the counter of writes.
        written = [func.name() for func, output in self._found if output._version]
        if written:
            raise KeptActivationError(
                f"the layer writes into its own kept activation, the result of {written[0]}"
            )


class _Replaying(_PartMode):
    """Return kept tensors instead of running the operations that made them."""

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
        """Drop the tensors: after a fault its traceback keeps this object."""
        self._tensors = ()

    def collected(self, func: Any, args: Any, kwargs: Any, results: Results | None) -> Any:
        found = [self._take(func, result) for result in results or (CollectedResult(),)]
        returned = func._schema.returns
        if len(returned) == 1:
            return found[0]
        return (*found, *(unused_result(result.name, args) for result in returned[len(found) :]))

    def passed(self, func: Any, args: Any, kwargs: Any, results: Results) -> Any:
        [result] = results
        assert result.shape is not None and result.dtype is not None, "a product knows its result"
        return args[0].new_empty(result.shape, dtype=result.dtype)

    def take_all(self) -> Sequence[Tensor]:
        left, self._next = self._tensors[self._next :], len(self._tensors)
        return left

    def check_used_up(self) -> None:
        if self._next < len(self._tensors):
            raise KeptActivationError(
                f"the layer took {self._next} of its {len(self._tensors)} kept activations in its recomputation"
            )

    def _take(self, func: Any, result: CollectedResult) -> Tensor:
        if self._next == len(self._tensors):
            raise KeptActivationError(
                f"{func.name()} needs kept activation number {self._next + 1}, and only {self._next} were kept"
            )
        kept = self._tensors[self._next]
        self._next += 1
        if not result.fits(kept):
            raise KeptActivationError(
                f"kept activation number {self._next} has shape {tuple(kept.shape)} and type {kept.dtype}, "
                f"but {func.name()} gives {result.shape} and {result.dtype}"
            )
        # Another tensor of the same memory: autograd makes this one a node of a graph.
        return result.as_returned(kept)

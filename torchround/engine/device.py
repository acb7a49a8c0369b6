"""The device interface, and the cpu (virtual) devices and accelerators behind it.

A cpu device runs every operation at once in the calling thread; an accelerator only enqueues it. Everything that decides
what waits for what is in code that both share, so the race checker sees on the CPU what an accelerator will do. What
differs between kinds of accelerators is in `accelerators.py`.
"""

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from torchround.accelerators import kind_of
from torchround.engine.errors import DeviceMemoryError, FaultLocation
from torchround.planning.memory import GIB
from torchround.planning.partition import SpanKind

if TYPE_CHECKING:
    from torchround.engine.board import Observer

T = TypeVar("T")

# The step of operations that belong to no training step: those of an evaluation.
NO_STEP = -1
EVENTS_AT_ONCE = 64  # recorded events between two questions which of them are passed


class Stream(Enum):
    """The five queues of a device; operations of one stream run in the order they were enqueued."""

    # An enumeration's own is a function in Python, and streams are keys everywhere.
    __hash__ = object.__hash__

    COMPUTE = "compute"
    WEIGHT_UPLOAD = "weight upload"
    ACTIVATION_UPLOAD = "activation upload"
    ACTIVATION_DOWNLOAD = "activation download"
    GRADIENT_DOWNLOAD = "gradient download"


# Experts that a layer asks for come up in the order of its computation.
UPLOADS = (Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD, Stream.COMPUTE)
COPIES = {
    Stream.COMPUTE: SpanKind.WEIGHTS,
    Stream.WEIGHT_UPLOAD: SpanKind.WEIGHTS,
    Stream.ACTIVATION_UPLOAD: SpanKind.RELOAD,
    Stream.ACTIVATION_DOWNLOAD: SpanKind.OFFLOAD,
    Stream.GRADIENT_DOWNLOAD: SpanKind.GRADIENTS,
}


class Mark:
    """A point in a stream whose time can be read: that of `event`, or `host_s` for a point that is passed already.

    `host_s` is the host's time when the mark was made.
    """

    def __init__(self, event: torch.Event | None = None) -> None:
        self.event = event
        self.host_s = time.perf_counter()

    def synchronize(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def query(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: "Mark") -> float:
        """Measure the seconds between two marks of one device. Waits until the device has passed both."""
        if self.event is None or earlier.event is None:
            return self.host_s - earlier.host_s
        # The marks may be in two streams, and then either stream may reach its mark last.
        earlier.synchronize()
        self.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000.0


@dataclass(frozen=True)
class Span:
    """One computation of `layers` for one micro-batch, or one copy, between two marks in its stream.

    Or one bundle's update, between two marks of the host; `layers` is then the first layer that uses it.
    """

    kind: SpanKind
    start: Mark
    end: Mark
    stream: Stream = Stream.COMPUTE
    micro_batch: int = 0
    layers: range = range(0)
    copied_bytes: int = 0

    @property
    def seconds(self) -> float:
        """The duration. Waits until the device has passed its end."""
        return self.end.seconds_since(self.start)

    def trace_event(self, process: int, step: int, start_s: float) -> dict[str, object]:
        """Describe the span in the Trace Event Format, on the thread of its stream. Steps count from 0, in files from 1."""
        ends = dict.fromkeys((self.layers[0], self.layers[-1])) if self.layers else ()
        return {
            "ph": "X",
            "name": f"{self.kind.value} {'-'.join(map(str, ends))}",
            "cat": self.kind.value,
            "pid": process,
            "tid": list(Stream).index(self.stream),
            "ts": start_s * 1e6,
            "dur": self.seconds * 1e6,
            "args": {"step": step + 1, "micro_batch": self.micro_batch, "moved_bytes": self.copied_bytes},
        }


# A point in a stream. The host may wait for it, or ask whether it is passed. A failed device may raise in both.
Event = torch.Event | Mark
# The point after work of the host itself, or of a device that runs everything at once.
PASSED = Mark()


class Device(ABC):
    """Memory, streams and events of one worker. Used by one thread at a time, events by all threads.

    `has_link` says that copies cross a link to the host. `step_of` gives, for each stream, the training step of what is
    enqueued next, or `NO_STEP`, for watchers. `copies` gets the copies of the steps that are its keys. `location` is where in
    the pipeline the device's thread is.
    """

    pins_host_memory: bool
    has_link: bool

    def __init__(self, name: str, torch_device: torch.device) -> None:
        self.name, self.torch_device = name, torch_device
        self.uploaded_bytes = self.downloaded_bytes = self.num_allocations = 0
        self.num_enqueued = 0  # operations and events
        self.buffers: list[Tensor] = []
        self.step_of = dict.fromkeys(Stream, 0)
        self.copies: dict[int, list[Span]] = {}
        self.watchers: list[Observer] = []
        self.location = FaultLocation(f"device {name}")
        # Events that the queues have not passed as far as is known, with what they announce and the location.
        self._events: dict[Stream, deque[tuple[Event, str, FaultLocation]]] = {
            stream: deque() for stream in Stream
        }
        self._num_passed = 0
        self._lock = threading.Lock()  # the device's thread and the watchdog's both forget passed events

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate a uint8 buffer that exists until `free`. Raises `DeviceMemoryError`."""
        self.num_allocations += 1
        # Held here: PyTorch could give memory that is dropped to one stream while another one still uses it.
        self.buffers.append(self._allocate(nbytes))
        return self.buffers[-1]

    def free(self) -> None:
        """Free all buffers, no matter what refers to them or to parts of them. The device must be idle."""
        for buffer in self.buffers:
            storage = buffer.untyped_storage()
            # A layer on a virtual device may have made an array of numpy of its input, which shares the memory.
            if storage.resizable():
                storage.resize_(0)
        self.buffers.clear()

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Enqueue `destination.copy_(source)` over the link; both have the same dtype."""
        if stream in UPLOADS:
            self.uploaded_bytes += source.nbytes
        else:
            self.downloaded_bytes += source.nbytes
        work = partial(destination.copy_, source, non_blocking=True)
        traced = self.copies.get(self.step_of[stream])
        start = PASSED if traced is None else self.mark(stream)
        self.run(stream, work, [source], [destination], source.nbytes)
        if traced is not None:
            traced.append(Span(COPIES[stream], start, self.mark(stream), stream, copied_bytes=source.nbytes))

    def run(
        self,
        stream: Stream,
        work: Callable[[], T],
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        copied_bytes: int = 0,
    ) -> T:
        """Enqueue the operations of `work`, which reads and writes these shared buffers."""
        # In the enqueuing thread, so that each watcher sees the operations of a stream in their order.
        for watcher in self.watchers:
            watcher.begins(self, stream, reads, writes, copied_bytes)
        result = self._run(stream, work)
        self.num_enqueued += 1
        for watcher in self.watchers:
            watcher.ends(self, stream, copied_bytes)
        return result

    def record(self, stream: Stream, what: str = "") -> Event:
        """Record an event after everything enqueued on `stream` so far. Watchers learn `what` it announces."""
        event = self._record(stream)
        self.num_enqueued += 1
        for watcher in self.watchers:
            event = watcher.recorded(self, stream, event, what)
        if event is not PASSED:
            events = self._events[stream]
            events.append((event, what, self.location))
            # Each question is a call of the driver, in the thread that launches kernels.
            if len(events) % EVENTS_AT_ONCE == 0:
                self._forget_passed(events)
        return event

    def wait(self, stream: Stream, event: Event, what: str = "") -> None:
        """Let everything enqueued on `stream` from now on start after `event`, of any device or of the host."""
        # In reverse, so that each watcher gets the event that it returned itself.
        for watcher in reversed(self.watchers):
            event = watcher.waits(self, stream, event, what)
        self._wait(stream, event)

    def follow(self, stream: Stream, earlier: Stream, what: str = "") -> None:
        """Let everything enqueued on `stream` from now on start after everything enqueued on `earlier` so far."""
        self.wait(stream, self.record(earlier, what), what)

    def moves(self) -> int:
        """Return a count that grows as long as the device or its thread progresses. Any thread may ask."""
        for events in self._events.values():
            self._forget_passed(events)
        return self.num_enqueued + self._num_passed

    def unfinished(self) -> Iterator[tuple[Stream, str]]:
        """Yield each queue with events that it has not passed, and a description of these."""
        for stream, events in self._events.items():
            self._forget_passed(events)
            if first := next(iter(events), None):  # another thread may forget it meanwhile
                _, what, location = first
                yield stream, f"has not passed {len(events)} event(s), the first one ({what}) of {location}"

    def _forget_passed(self, events: deque[tuple[Event, str, FaultLocation]]) -> None:
        # A failed device raises where a thread waits for it. Here it only makes no progress.
        with self._lock, suppress(RuntimeError):
            # A queue passes its events in their order.
            passed = bisect_left(events, True, key=lambda entry: not entry[0].query())
            for _ in range(passed):
                events.popleft()
            self._num_passed += passed

    def release(self) -> None:
        """Let another engine use the device, whose buffers are free. No watcher stays."""
        self.watchers.clear()
        with self._lock:  # the caller may look whether anything moves
            for events in self._events.values():
                events.clear()

    @abstractmethod
    def enter_thread(self) -> None:
        """Prepare the calling thread, which will drive this device."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Count the most device memory held at once so far, as far as the device can tell."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Tensor: ...

    # A device that enqueues operations overrides the following ones.

    def finish(self) -> None:  # noqa: B027  (a virtual device is always idle)
        """Block until every stream is idle."""

    def mark(self, stream: Stream) -> Mark:
        """Record a timed point after everything enqueued on `stream` so far."""
        return Mark()

    def host_s(self, mark: Mark) -> float:
        """Convert the time of a mark to the host's clock. Waits until the device has passed it."""
        return mark.host_s

    def _run(self, stream: Stream, work: Callable[[], T]) -> T:
        return work()

    def _record(self, stream: Stream) -> Event:
        return PASSED

    def _wait(self, stream: Stream, event: Event) -> None:
        # Nothing is enqueued here, so the thread itself waits before it runs the next operation.
        event.synchronize()


class CpuDevice(Device):
    """A virtual device: a thread with a count of its own memory, and maybe a limit."""

    pins_host_memory = False
    has_link = False

    def __init__(self, index: int, memory_limit_bytes: int | None = None) -> None:
        super().__init__(f"cpu:{index}", torch.device("cpu"))
        self._limit_bytes = memory_limit_bytes
        self._peak_bytes = 0

    def enter_thread(self) -> None:
        # With several threads the bits of most operations depend on their number: a product may cut its sum, and the
        # ends of an elementwise operation's parts are computed by other instructions than their middles.
        use_threads_here(1)

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def _allocate(self, nbytes: int) -> Tensor:
        allocated = sum(buffer.nbytes for buffer in self.buffers)
        if self._limit_bytes is not None and allocated + nbytes > self._limit_bytes:
            raise DeviceMemoryError(
                f"{self.name} cannot allocate {nbytes / GIB:.3f} GiB: it has {self._limit_bytes / GIB:.3f} GiB, "
                f"and {allocated / GIB:.3f} GiB of that is in use"
            )
        self._peak_bytes = max(self._peak_bytes, allocated + nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


class AcceleratorDevice(Device):
    """An accelerator, or one of several workers that share one; each worker has its own five streams."""

    has_link = True

    def __init__(self, torch_device: torch.device | str, worker: int | None = None) -> None:
        device = torch.device(torch_device)
        assert device.index is not None, f"{device} names no single device"
        super().__init__(str(device) if worker is None else f"{device}/{worker}", device)
        self.kind = kind_of(device.type)
        self.kind.prepare_allocator()
        self.pins_host_memory = self.kind.locks_pages
        # Small kernels round gradients between copies. At equal priority each would queue behind those of a whole stage.
        priorities = {Stream.GRADIENT_DOWNLOAD: -1}
        self._streams = {stream: self.kind.stream(device, priorities.get(stream, 0)) for stream in Stream}
        # A mark and its time by the host's clock. The first is passed at once: the stream is empty.
        first = self.mark(Stream.COMPUTE)
        self._clock = first, first.host_s

    def mark(self, stream: Stream) -> Mark:
        return Mark(self._record(stream, timed=True))

    def host_s(self, mark: Mark) -> float:
        # From the mark before: devices count milliseconds between two marks in float32, too coarse for hours.
        before, before_s = self._clock
        self._clock = mark, before_s + mark.seconds_since(before)
        return self._clock[1]

    def enter_thread(self) -> None:
        torch.accelerator.set_device_index(self.torch_device)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def peak_bytes(self) -> int:
        return self.kind.peak_bytes(self.torch_device.index)

    def _allocate(self, nbytes: int) -> Tensor:
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = self.kind.free_and_total_bytes(self.torch_device.index)
            raise DeviceMemoryError(
                f"{self.name} cannot allocate {nbytes / GIB:.3f} GiB: {free / GIB:.3f} of its {total / GIB:.3f} GiB "
                "are free"
            ) from error
        # The previous user of this memory freed it in the order of the thread's current stream, which our
        # streams know nothing about. In deterministic mode PyTorch also fills the buffer on that stream.
        allocated = torch.accelerator.current_stream(self.torch_device).record_event()
        for stream in self._streams.values():
            stream.wait_event(allocated)
        return buffer

    def _run(self, stream: Stream, work: Callable[[], T]) -> T:
        with self._streams[stream]:
            return work()

    def _record(self, stream: Stream, timed: bool = False) -> torch.Event:
        event = self.kind.event(self.torch_device, timed)
        event.record(self._streams[stream])
        return event

    def _wait(self, stream: Stream, event: Event) -> None:
        if isinstance(event, torch.Event) and (
            self.kind.events_cross_devices or event.device == self.torch_device
        ):
            self._streams[stream].wait_event(event)
        else:
            # The host's own event, or one that this stream cannot wait for: its work is done once this returns.
            event.synchronize()

    def release(self) -> None:
        super().release()
        # PyTorch's allocator keeps free memory for a tensor of its size. The next engine has buffers of other sizes.
        torch.accelerator.empty_cache()


def use_threads_here(count: int) -> None:
    """Run this thread's parallel operations with `count` threads.

    `torch.set_num_threads` would change it for later threads too, so this calls OpenMP and MKL, after PyTorch's own setup.
    """
    torch.get_num_threads()
    with suppress(OSError):
        library = ctypes.CDLL(torch._C.__file__)
        for function in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
            with suppress(AttributeError):
                getattr(library, function)(ctypes.c_int(count))

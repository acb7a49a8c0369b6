"""The device interface, and the cpu (virtual) and cuda devices behind it.

The engine touches device memory, streams and events only through `Device`. A cpu device runs every operation
at once in the calling thread; a cuda device only enqueues. Everything that decides what waits for what is in
shared code, so that the race checker sees on the CPU what CUDA will do (DESIGN section 6).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from torchround.engine.errors import DeviceMemoryError

GIB = 2**30
T = TypeVar("T")


class Stream(Enum):
    """The five queues of a device; operations of one stream run in the order they were enqueued."""

    COMPUTE = "compute"
    WEIGHT_UPLOAD = "weight upload"
    ACTIVATION_UPLOAD = "activation upload"
    ACTIVATION_DOWNLOAD = "activation download"
    GRADIENT_DOWNLOAD = "gradient download"


UPLOADS = (Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD)


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block the calling host thread until the stream has passed this point."""
        ...

    def query(self) -> bool:
        """Whether the stream has passed this point. A failed device may raise here too."""
        ...


class Mark(Protocol):
    """A point in a stream whose time can be read."""

    def seconds_since(self, earlier: "Mark") -> float: ...


class Device(ABC):
    """Memory, streams and events of one worker. Used by one thread at a time, events by all."""

    name: str
    torch_device: torch.device
    pins_host_memory: bool
    has_link: bool  # copies go over a link to the host, which other devices may be on too

    def __init__(self) -> None:
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0
        self.num_allocations = 0

    def allocate(self, nbytes: int) -> Tensor:
        """A uint8 buffer that lives as long as the device. Raises `DeviceMemoryError`."""
        self.num_allocations += 1
        return self._allocate(nbytes)

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Enqueue `destination.copy_(source)` over the link; both have the same dtype."""
        if stream in UPLOADS:
            self.uploaded_bytes += source.nbytes
        else:
            self.downloaded_bytes += source.nbytes
        self._copy(stream, destination, source)

    @abstractmethod
    def _allocate(self, nbytes: int) -> Tensor: ...

    @abstractmethod
    def _copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None: ...

    @abstractmethod
    def run(
        self,
        stream: Stream,
        work: Callable[[], T],
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
    ) -> T:
        """Enqueue the operations of `work`, which reads and writes these shared buffers."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event after everything enqueued on `stream` so far."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on `stream` from now on starts after `event`, of this or another device or the host."""

    @abstractmethod
    def mark(self, stream: Stream) -> Mark:
        """A timed point after everything enqueued on `stream` so far."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called once by the thread that will drive this device."""

    @abstractmethod
    def finish(self) -> None:
        """Block until every stream is idle."""

    @abstractmethod
    def release(self) -> None:
        """Whoever allocated on this device lets go of all of it; another engine may use the device."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most device memory held at once so far, as far as the device can tell."""


class ForwardingDevice(Device):
    """Behaves as `inner`: what a device that only watches another one is made of."""

    def __init__(self, inner: Device) -> None:
        super().__init__()
        self.name = inner.name
        self.torch_device = inner.torch_device
        self.pins_host_memory = inner.pins_host_memory
        self.has_link = inner.has_link
        self._inner = inner

    def _allocate(self, nbytes: int) -> Tensor:
        return self._inner.allocate(nbytes)

    def _copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        self._inner.copy(stream, destination, source)

    def run(
        self,
        stream: Stream,
        work: Callable[[], T],
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
    ) -> T:
        return self._inner.run(stream, work, reads, writes)

    def record(self, stream: Stream) -> Event:
        return self._inner.record(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._inner.wait(stream, event)

    def mark(self, stream: Stream) -> Mark:
        return self._inner.mark(stream)

    def enter_thread(self) -> None:
        self._inner.enter_thread()

    def finish(self) -> None:
        self._inner.finish()

    def release(self) -> None:
        self._inner.release()

    def peak_bytes(self) -> int:
        return self._inner.peak_bytes()


class _Passed:
    """An event of a device that runs everything at once: always in the past."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _HostMark:
    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _HostMark), "marks of different devices cannot be compared"
        return self.seconds - earlier.seconds


class CpuDevice(Device):
    """A virtual device: a thread with its own memory ledger and limit. Copies do not overlap with compute."""

    pins_host_memory = False
    has_link = False

    def __init__(self, index: int, memory_limit_bytes: int | None = None) -> None:
        super().__init__()
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self._limit_bytes = memory_limit_bytes
        self._allocated_bytes = 0
        self._peak_bytes = 0

    def _allocate(self, nbytes: int) -> Tensor:
        if self._limit_bytes is not None and self._allocated_bytes + nbytes > self._limit_bytes:
            raise DeviceMemoryError(
                f"{self.name} has {self._limit_bytes / GIB:.3f} GiB, {self._allocated_bytes / GIB:.3f} GiB of it "
                f"taken; {nbytes / GIB:.3f} GiB more were asked for"
            )
        self._allocated_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def _copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    def run(
        self,
        stream: Stream,
        work: Callable[[], T],
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
    ) -> T:
        return work()

    def record(self, stream: Stream) -> Event:
        return _Passed()

    def wait(self, stream: Stream, event: Event) -> None:
        event.synchronize()

    def mark(self, stream: Stream) -> Mark:
        return _HostMark()

    def enter_thread(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def release(self) -> None:
        self._allocated_bytes = 0

    def peak_bytes(self) -> int:
        return self._peak_bytes


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark), "marks of different devices cannot be compared"
        for event in (earlier.event, self.event):  # of two streams, either may be the later one
            event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000.0


# Gradients are rounded by small kernels between their copies; behind a stage's kernels those would wait long.
_PRIORITIES = {Stream.GRADIENT_DOWNLOAD: -1}


class CudaDevice(Device):
    """A GPU, or one of several workers that share a GPU; each worker has its own five streams."""

    pins_host_memory = True
    has_link = True

    def __init__(self, index: int, worker: int | None = None) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}" if worker is None else f"cuda:{index}/{worker}"
        self._streams = {
            stream: torch.cuda.Stream(self.torch_device, _PRIORITIES.get(stream, 0)) for stream in Stream
        }

    def _allocate(self, nbytes: int) -> Tensor:
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise DeviceMemoryError(
                f"{self.name} has {free / GIB:.3f} of {total / GIB:.3f} GiB free; {nbytes / GIB:.3f} GiB were asked for"
            ) from error
        # Whoever had this memory before freed it in the order of the thread's current stream, which knows
        # nothing of ours; in deterministic mode PyTorch also fills it there.
        allocated = torch.cuda.current_stream(self.torch_device).record_event()
        for stream in self._streams.values():
            stream.wait_event(allocated)
        return buffer

    def _copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._streams[stream]):
            destination.copy_(source, non_blocking=True)

    def run(
        self,
        stream: Stream,
        work: Callable[[], T],
        reads: Iterable[Tensor] = (),
        writes: Iterable[Tensor] = (),
    ) -> T:
        with torch.cuda.stream(self._streams[stream]):
            return work()

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # threads that wait for it sleep instead of polling
        event.record(self._streams[stream])
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if isinstance(event, torch.cuda.Event):
            self._streams[stream].wait_event(event)
        else:
            event.synchronize()  # the host's own: what it wrote is written once this returns

    def mark(self, stream: Stream) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._streams[stream])
        return _CudaMark(event)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def release(self) -> None:
        pass  # PyTorch's allocator takes each buffer back with its last tensor

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

"""Frozen weights on their way from files to a device: a thread that reads ahead into page-locked memory.

A copy from pageable memory blocks the thread that asks for it until it is over, and a page that is not in
memory blocks it until the disk has answered. The thread that launches a device's kernels must do neither. So
one reader for each device fills the buffers of a ring, and the device's thread uploads from those that are
full. A buffer is read into again once its upload has ended.

The reader reads by offset from the file that was opened when the weights were mapped. It never touches the
map itself: if the file was cut short meanwhile, this gives an error, and the map would end the process.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from torchround.engine.board import Board, Queue
from torchround.engine.device import Event
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.store.bundles import MappedRange
from torchround.engine.store.host_memory import HostPool
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS

# What the two threads put for each other.
FILE_RANGES, FILE_BUFFER, FILE_BUFFER_UPLOADED = "file ranges", "a file buffer", "an uploaded file buffer"


class FileReader:
    """The thread that reads weights in files ahead of the uploads of device number `index`, and its ring of buffers.

    The device's thread calls `request` once for each upload, then for each range of it in turn `take` and
    `uploaded`.
    """

    def __init__(
        self,
        index: int,
        device_name: str,
        board: Board,
        pool: HostPool,
        on_failure: Callable[[PipelineError], None],
    ) -> None:
        self._index = index
        self._location = FaultLocation(f"reader of device {device_name}")
        self._board = board
        self._buffers = [pool.take(READER_BUFFER_BYTES) for _ in range(READER_BUFFERS)]
        self._on_failure = on_failure
        self._requests = Queue[MappedRange](board, FILE_RANGES)
        self._filled = Queue[Tensor](board, FILE_BUFFER)
        self._uploads = Queue[Event](board, FILE_BUFFER_UPLOADED)
        name = f"torchround reads for {device_name}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    # For the device's thread.

    def request(self, ranges: Sequence[MappedRange]) -> None:
        """Let these ranges be read, in this order; each fits into a buffer."""
        self._requests.put(*ranges)

    @property
    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return self._filled.peek() is not None

    def take(self) -> Tensor:
        """Return the content of the next range as uint8, waiting for the reader if needed."""
        return self._filled.take(
            f"the reader of device {self._index} to have filled a buffer with weights in files"
        )

    def uploaded(self, event: Event) -> None:
        """Note that the upload of what `take` returned ends at `event`."""
        self._uploads.put(event)

    def let_go(self) -> None:
        """Drop the buffers that were read and not taken. Both threads must have ended."""
        self._filled = Queue(self._board, FILE_BUFFER)

    # In the reader's own thread.

    def _main(self) -> None:
        try:
            for number in itertools.count():
                words = f"the next upload of weights in files to device {self._index}"
                self._filled.put(self._read(number, self._requests.take(words)))
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (any fault must reach the caller)
            self._on_failure(self._failure(error))

    def _failure(self, error: BaseException) -> PipelineError:
        failure = PipelineError(self._location, f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _read(self, number: int, file_range: MappedRange) -> Tensor:
        """Read a range into the buffer whose turn it is."""
        if number >= READER_BUFFERS:
            buffer = number - READER_BUFFERS
            words = f"device {self._index} to have uploaded buffer {buffer} of weights in files"
            self._board.synchronize(self._uploads.take(words), words)
        content = self._buffers[number % READER_BUFFERS].memory[: file_range.memory.nbytes]
        self._board.observer.touched(reads=(), writes=[content])
        read_range(file_range, content)
        return content


def pieces_of(ranges: Sequence[MappedRange]) -> list[MappedRange]:
    """Cut ranges into pieces that fit into a buffer each."""
    return [
        mapped.part(start, min(start + size, mapped.memory.numel()))
        for mapped in ranges
        for size in [READER_BUFFER_BYTES // mapped.memory.itemsize]
        for start in range(0, mapped.memory.numel(), size)
    ]


def read_range(file_range: MappedRange, content: Tensor) -> None:
    """Read a range of a file into `content`, uint8 of its size. Raises `OSError`, which names the file."""
    file = file_range.file
    assert file is not None, "the range is in memory, not in a file"
    space, begin = content.numpy().data, file_range.begin
    while space:
        try:
            num_read = os.preadv(file.descriptor, [space], begin)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.path)) from error
        if num_read == 0:
            raise OSError(f"{file.path} was cut short while the run used it: it ends before byte {begin + 1}")
        space, begin = space[num_read:], begin + num_read

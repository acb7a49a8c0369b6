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
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from torchround.engine.board import Board, HandOver
from torchround.engine.device import Event
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.store.bundles import MappedRange
from torchround.engine.store.host_memory import HostPool
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS

FILE_RANGES = HandOver[Sequence[MappedRange]]("the {0}th upload of weights in files to device {1}")
FILE_BUFFER = HandOver[Tensor]("the reader of device {1} to have filled buffer {0} with weights in files")
FILE_BUFFER_UPLOADED = HandOver[Event]("device {1} to have uploaded buffer {0} of weights in files")


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
        self._requests = itertools.count()
        self._taken = 0
        name = f"torchround reads for {device_name}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    # For the device's thread.

    def request(self, ranges: Sequence[MappedRange]) -> None:
        """Let these ranges be read, in this order; each fits into a buffer."""
        self._board.post(FILE_RANGES(next(self._requests), self._index), ranges)

    @property
    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return self._board.ready(FILE_BUFFER(self._taken, self._index))

    def take(self) -> Tensor:
        """Return the content of the next range as uint8, waiting for the reader if needed."""
        key = FILE_BUFFER(self._taken, self._index)
        content = self._board.wait(key)
        self._board.forget(key)
        return content

    def uploaded(self, event: Event) -> None:
        """Note that the upload of what `take` returned ends at `event`."""
        self._board.post(FILE_BUFFER_UPLOADED(self._taken, self._index), event)
        self._taken += 1

    def let_go(self) -> None:
        """Drop the buffers that were read and not taken. Both threads must have ended."""
        for number in range(self._taken, self._taken + READER_BUFFERS):
            self._board.forget(FILE_BUFFER(number, self._index))

    # In the reader's own thread.

    def _main(self) -> None:
        try:
            for number, file_range in enumerate(self._requested()):
                self._board.post(FILE_BUFFER(number, self._index), self._read(number, file_range))
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (any fault must reach the caller)
            self._on_failure(self._failure(error))

    def _failure(self, error: BaseException) -> PipelineError:
        failure = PipelineError(self._location, f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _requested(self) -> Iterator[MappedRange]:
        for request in itertools.count():
            key = FILE_RANGES(request, self._index)
            ranges = self._board.wait(key)
            self._board.forget(key)
            yield from ranges

    def _read(self, number: int, file_range: MappedRange) -> Tensor:
        """Read a range into the buffer whose turn it is."""
        if number >= READER_BUFFERS:
            self._await_upload(number - READER_BUFFERS)
        content = self._buffers[number % READER_BUFFERS].memory[: file_range.memory.nbytes]
        self._board.observer.touched(reads=(), writes=[content])
        read_range(file_range, content)
        return content

    def _await_upload(self, number: int) -> None:
        key = FILE_BUFFER_UPLOADED(number, self._index)
        self._board.synchronize(self._board.wait(key), key)
        self._board.forget(key)


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

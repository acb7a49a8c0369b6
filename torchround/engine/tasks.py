"""Tasks in program order, and the one rule by which they wait for each other.

Each access to memory begins after every earlier access that it conflicts with: one that writes what it reads, reads what it
writes, or writes what it writes. Nothing else orders two threads, except values that are made once (`board.py`).

An access ends with its task or before. A stage job ends the read of a layer's weights once their upload is enqueued, with an
event of the device, so that an update need not wait for the whole stage.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchround.engine.board import Board, Flag, Queue, Watchdog
from torchround.engine.device import Event
from torchround.engine.errors import FaultLocation, PipelineError, Stopped

# The most reads that a write waits for, so that a run of evaluations, which write nothing, remembers no more.
MOST_READERS = 8

# The kinds of memory that is written again.
WEIGHTS = "device weights"
STATE = "fp32 weights and optimizer state"
GRADIENT = "gradient"
PART = "part of a gradient"
DIRECTION = "direction"
RECORDS = "records of the store"
DECISION = "decision on an update"


class Buffer:
    """Memory that is written again. `content` is its pool buffer, or what its writer leaves with it."""

    __slots__ = ("content", "kind", "name", "readers", "writer")

    def __init__(self, kind: str, name: str = "", content: Any = None) -> None:
        self.kind = kind
        self.name = f"{kind} of {name}" if name else kind
        self.content = content
        self.writer: Access | None = None
        self.readers: list[Access] = []


@dataclass(eq=False, repr=False, slots=True)
class Access(Flag):
    """One task's use of a buffer. It happens when the use has ended, for a device at `event` in its stream.

    `after` are the earlier accesses that it conflicts with, until it has waited for them.
    """

    task: "Task"
    buffer: Buffer
    writes: bool
    after: tuple["Access", ...]
    event: Event | None = None

    def __str__(self) -> str:
        return f"{self.task} to {'write' if self.writes else 'read'} the {self.buffer.name}"

    @property
    def is_ready(self) -> bool:
        return all(earlier.happened for earlier in self.after)

    def begin(self, board: Board | Watchdog) -> None:
        """Wait until the access may begin. Raises `Stopped`."""
        for earlier in self.after:
            earlier.wait(board)
        self.after = ()

    def wait(self, board: Board | Watchdog) -> None:
        """Wait until the use has ended, and its device has passed that point."""
        board.wait_for(self, self)
        if self.event is not None:
            board.synchronize(self.event, self)

    def end(self, board: Board, event: Event | None = None) -> None:
        """Let later accesses that conflict with this one begin, once a device has passed `event`."""
        self.event = event
        self.after = ()  # otherwise each access would keep all before it
        board.happen(self)


@dataclass(eq=False, repr=False, slots=True)
class Task(Flag):
    """One piece of work of a worker. It happens when it has run and all its accesses have ended."""

    name: str
    step: int
    location: FaultLocation
    run: Callable[[], object] | None = None
    worker: "Worker | None" = None
    accesses: list[Access] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} of step {self.step} ({self.location})"

    def declare(self, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> "Task":
        """Give the task more accesses, in order. Calls follow the program's order."""
        for buffer in reads:
            self._read(buffer)
        for buffer in writes:
            # Readers have waited for the writer before them, so a wait for them is one for it too.
            after = buffer.readers or ([] if buffer.writer is None else [buffer.writer])
            # A task may read what it writes: its own accesses do not wait for each other.
            others = tuple(earlier for earlier in after if earlier.task is not self)
            buffer.writer, buffer.readers = Access(self, buffer, True, others), []
            self.accesses.append(buffer.writer)
        return self

    def _read(self, buffer: Buffer) -> None:
        after: tuple[Access, ...] = () if buffer.writer is None else (buffer.writer,)
        # In place of the next write, which waits for this read. A save may wait for the disk, and is left to the write.
        if len(buffer.readers) >= MOST_READERS:
            older = (read for read in buffer.readers if not (read.task.worker and read.task.worker.saves))
            oldest = next(older, None)
            if oldest is not None and oldest.task is not self:
                buffer.readers.remove(oldest)
                after += (oldest,)
        access = Access(self, buffer, False, after)
        buffer.readers.append(access)
        self.accesses.append(access)

    def finish(self, board: Board) -> None:
        for access in self.accesses:
            if not access.happened:
                access.end(board)
        self.accesses, self.run = [], None  # buffers remember the accesses, and these the task
        board.happen(self)


class Worker:
    """A thread that runs its tasks one after the other. `saves` says that its reads outlast a stop for a while."""

    def __init__(
        self,
        name: str,
        actor: str,
        board: Board,
        on_fault: Callable[[BaseException, FaultLocation], None] | None = None,
        saves: bool = False,
    ) -> None:
        self.actor = actor  # in the location of a fault
        self.saves = saves
        self.moves = 0
        self.busy_s = 0.0
        self.task: Task | None = None  # under way
        self.last: Task | None = None
        self._board = board
        self._on_fault = on_fault or (lambda error, location: board.fail(PipelineError.of(error, location)))
        self._queue = Queue[Task](board, "a task")
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def enter(self) -> None:
        """Prepare the thread, before its first task."""

    def leave(self) -> None:
        """End what `enter` began."""

    def is_begun(self, step: int) -> bool:
        """Tell whether tasks of a step run even after a stop, because a begun update cannot stop half-way."""
        return False

    def overcome(self, error: BaseException) -> None:
        """Take the error of a device for whose access a begun update has waited."""

    def put(self, tasks: Sequence[Task]) -> None:
        """Let the worker run these after all that it has. Together: a stop must not part the tasks of an update."""
        self.last = tasks[-1]
        self._queue.put(*tasks)

    @property
    def is_idle(self) -> bool:
        return self.last is None or self.last.happened

    def _main(self) -> None:
        try:
            self.enter()
            while True:
                self.task = None
                self.task = self._queue.take("its next task")
                if not self.is_begun(self.task.step):
                    self._board.raise_if_stopped()
                self._run(self.task)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (any fault must reach the caller)
            self._on_fault(error, FaultLocation(self.actor) if self.task is None else self.task.location)
        finally:
            self.leave()

    def _run(self, task: Task) -> None:
        self.moves += 1
        for access in task.accesses:
            for earlier in access.after:
                self._wait_for(earlier)
            access.after = ()
        assert task.run is not None, f"{task} runs twice"
        start_s = time.perf_counter()
        task.run()
        self.busy_s += time.perf_counter() - start_s
        task.finish(self._board)

    def _wait_for(self, earlier: Access) -> None:
        """Wait for an earlier access. A begun update continues whatever happens to others meanwhile."""
        try:
            earlier.wait(self._board)
        except BaseException as error:
            if self.task is None or not self.is_begun(self.task.step):
                raise
            if not isinstance(error, Stopped):
                self.overcome(error)  # a device that failed reads no more
            # Results of what devices still read are dropped, because the engine has stopped. A save is not: it
            # gives up soon, but until then it reads.
            saver = earlier.task.worker
            while saver and saver.saves and saver.thread.is_alive() and not earlier.happened:
                time.sleep(0.005)

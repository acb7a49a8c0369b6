"""Tasks in program order, and the one rule by which they wait for each other.

The controller declares tasks in program order. A task names the memory that it reads and writes. Each access begins after
every earlier access that it conflicts with: one that writes what it reads, reads what it writes, or writes what it
writes. Nothing else orders two threads, except values that are made once (`board.py`).

An access ends with its task or before. A stage job ends the read of a layer's weights once their upload is enqueued, so
that an update need not wait for the whole stage. Its end then comes with the event of the device.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchround.engine.board import Board, Flag, Queue
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
    """One task's use of a buffer, or of several that it takes together. It happens when the use has ended.

    `after` are the earlier accesses that it conflicts with, until it has waited for them. `event` is the point of a
    device's stream at which the use has ended; None if the host has done it.
    """

    task: "Task"
    buffer: Buffer  # the first one
    writes: bool
    after: tuple["Access", ...]
    event: Event | None = None

    def __str__(self) -> str:
        return f"{self.task} to {'write' if self.writes else 'read'} the {self.buffer.name}"

    @property
    def is_ready(self) -> bool:
        """Whether `Tasks.begin` need not wait for another thread."""
        return all(earlier.happened for earlier in self.after)


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


class Tasks:
    """The tasks of an engine. The controller declares them, and a device those of its reader of files.

    Workers wait for and end their own accesses.
    """

    def __init__(self, board: Board) -> None:
        self.board = board

    def declare(
        self, task: Task, reads: Iterable[Buffer] = (), writes: Iterable[Buffer | Sequence[Buffer]] = ()
    ) -> Task:
        """Give a task its accesses, in order. Calls follow the program's order. A sequence in `writes` is one access."""
        for buffer in reads:
            self._read(task, buffer)
        for buffers in writes:
            self._write(task, (buffers,) if isinstance(buffers, Buffer) else buffers)
        return task

    def _read(self, task: Task, buffer: Buffer) -> None:
        after: tuple[Access, ...] = () if buffer.writer is None else (buffer.writer,)
        # In place of the next write, which waits for this read. A save may wait for the disk, and is left to the write.
        if len(buffer.readers) >= MOST_READERS:
            older = (read for read in buffer.readers if not (read.task.worker and read.task.worker.saves))
            oldest = next(older, None)
            if oldest is not None and oldest.task is not task:
                buffer.readers.remove(oldest)
                after += (oldest,)
        access = Access(task, buffer, False, after)
        buffer.readers.append(access)
        task.accesses.append(access)

    def _write(self, task: Task, buffers: Sequence[Buffer]) -> None:
        after: list[Access] = []
        for buffer in buffers:
            # Readers have waited for the writer before them, so a wait for them is one for it too.
            after += buffer.readers or ([] if buffer.writer is None else [buffer.writer])
        # A task may read what it writes: its own accesses do not wait for each other.
        others = tuple(dict.fromkeys(earlier for earlier in after if earlier.task is not task))
        access = Access(task, buffers[0], True, others)
        for buffer in buffers:
            buffer.writer, buffer.readers = access, []
        task.accesses.append(access)

    def begin(self, access: Access, wait_for: Callable[[Access], None] | None = None) -> None:
        """Wait until the access may begin, by `wait_for` for each earlier one. Raises `Stopped` if the engine stops before."""
        for earlier in access.after:
            (wait_for or self.wait_for)(earlier)
        access.after = ()

    def wait_for(self, earlier: Access) -> None:
        """Wait until an access has ended, and its device has passed that point."""
        self.board.wait_for(earlier, earlier)
        if earlier.event is not None:
            self.board.synchronize(earlier.event, earlier)

    def end(self, access: Access, event: Event | None = None) -> None:
        """Let later accesses that conflict with this one begin, once a device has passed `event`."""
        access.event = event
        access.after = ()  # otherwise each access would keep all before it
        self.board.happen(access)

    def finish(self, task: Task) -> None:
        """End what a task has not ended itself, and the task."""
        for access in task.accesses:
            if not access.happened:
                self.end(access)
        task.accesses, task.run = [], None  # buffers remember the accesses, and these the task
        self.board.happen(task)


class Worker:
    """A thread that runs its tasks one after the other.

    `saves` says that its reads outlast a stop for a while. `moves` grows with each task that it begins. `busy_s` is the
    time inside its tasks, `waited_for_saves_s` that in which an update that had begun waited for a worker that `saves`.
    """

    def __init__(
        self,
        name: str,
        actor: str,
        tasks: Tasks,
        on_fault: Callable[[Task | None, BaseException], None] | None = None,
        saves: bool = False,
    ) -> None:
        self.actor = actor  # in the location of a fault
        self.saves = saves
        self.moves = 0
        self.busy_s = self.waited_for_saves_s = 0.0
        self.task: Task | None = None  # under way
        self.last: Task | None = None
        self._tasks = tasks
        self._on_fault = on_fault or self._fail
        self._queue = Queue[Task](tasks.board, "a task")
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        self.has_ended = False

    def enter(self) -> None:
        """Prepare the thread, before its first task."""

    def leave(self) -> None:
        """End what `enter` began."""

    def is_begun(self, step: int) -> bool:
        """Tell whether tasks of a step run although the engine has stopped, because a begun update cannot stop half-way."""
        return False

    def overcome(self, error: BaseException) -> None:
        """Take the error of a device whose access a task of a begun update has waited for."""

    def put(self, tasks: Sequence[Task]) -> None:
        """Let the worker run these after all that it has. Together: a stop must not part the tasks of an update."""
        self.last = tasks[-1]
        self._queue.put(*tasks)

    @property
    def is_idle(self) -> bool:
        """Whether all tasks that it got have ended."""
        return self.last is None or self.last.happened

    def _fail(self, task: Task | None, error: BaseException) -> None:
        location = FaultLocation(self.actor) if task is None else task.location
        self._tasks.board.fail(PipelineError.of(error, location))

    def _main(self) -> None:
        try:
            self.enter()
            while True:
                self.task = None
                self.task = self._queue.take("its next task")
                if not self.is_begun(self.task.step):
                    self._tasks.board.raise_if_stopped()
                self._run(self.task)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (any fault must reach the caller)
            self._on_fault(self.task, error)
        finally:
            self.has_ended = True
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
        self._tasks.finish(task)

    def _wait_for(self, earlier: Access) -> None:
        """Wait for an earlier access. A begun update continues whatever happens to others meanwhile."""
        saver = earlier.task.worker if earlier.task.worker and earlier.task.worker.saves else None
        start_s = time.perf_counter() if saver else 0.0
        try:
            self._tasks.wait_for(earlier)
        except BaseException as error:
            if self.task is None or not self.is_begun(self.task.step):
                raise
            if not isinstance(error, Stopped):
                self.overcome(error)  # a device that failed reads no more
            # Results of what devices still read are dropped, because the engine has stopped. A save is not: it
            # gives up soon, but until then it reads.
            while saver and not (earlier.happened or saver.has_ended):
                time.sleep(0.005)
        if saver:
            self.waited_for_saves_s += time.perf_counter() - start_s

"""One thread that lets saves read the host store beside training, between two updates of each bundle.

A save's own work (files, checksums, the disk) is its caller's function; this gives it the store as it is after a
certain step, and lets the next update of a bundle begin as soon as the save has read it. A thread of its own rather
than the optimizer's, because that one has gradients to add up while a disk is waited for.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from torchround.engine.board import Board, Fact
from torchround.engine.errors import Stopped
from torchround.engine.ordering import Ordering
from torchround.engine.store.host_store import HostStore

T = TypeVar("T")


class SaveSource:
    """What a save reads, the store after `step` steps, and what it has to say about how far it is.

    `state` is what `HostStore.resume` needs besides `tensors`. For the saving thread alone.
    """

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        index: int,
        step: int,
        state: Mapping[str, Any],
    ) -> None:
        self.step = step
        self.state = state
        self.tensors: dict[str, Tensor] = {}
        self._board = board
        self._ordering = ordering
        self._index = index
        self._bundle_of: dict[str, int] = {}
        for bundle in store.bundles:
            views = store.bundle_views(bundle, step)
            self.tensors |= views
            if bundle.trainable:
                self._bundle_of |= dict.fromkeys(views, bundle.index)
        self._unread = Counter(self._bundle_of.values())

    def raise_if_abandoned(self) -> None:
        """Between pieces. Raises `Stopped` where the engine has ended."""
        self._board.note_progress()
        self._board.raise_if_stopped()

    def reading(self, tensor: Tensor) -> None:
        """The tensor's bytes are about to be read."""
        self._board.observer.touched(reads=[tensor], writes=())

    def finished_reading(self, name: str) -> None:
        """The named tensor is not read again. With the last one of a bundle, the bundle may be updated."""
        bundle = self._bundle_of.pop(name, None)
        if bundle is None:
            return
        self._unread[bundle] -= 1
        if not self._unread[bundle]:
            self._ordering.read_by_save(bundle, self.step, self._index)

    def before_publishing(self) -> None:
        """Nothing is read again. Waits for `PendingSave.may_publish`. Raises `Stopped` where the engine has ended.

        Also where it might have gone on before: whoever ended the engine may be at these files by now.
        """
        self.finish_reading()
        self._board.wait(Fact("save may be published", self._index))
        self._board.raise_if_stopped()

    def finish_reading(self) -> None:
        """Whatever was not read is not going to be."""
        for name in list(self._bundle_of):
            self.finished_reading(name)


@dataclass(frozen=True)
class SaveJob:
    """A save of the store after `step` steps: `write` does it and returns what its caller wants to know."""

    step: int
    write: Callable[[SaveSource], object]


@dataclass(frozen=True)
class Outcome:
    """What `write` returned, or what it raised."""

    value: object = None
    error: Exception | None = None


class PendingSave(Generic[T]):
    """A save under way beside training."""

    def __init__(self, index: int, board: Board, wait: Callable[[Fact], object]) -> None:
        self._index = index
        self._board = board
        self._wait = wait

    @property
    def ended(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._board.ready(self._fact)

    def may_publish(self) -> None:
        """Whatever must be on record before the checkpoint counts is: a save goes no further before."""
        self._board.post(Fact("save may be published", self._index))

    def wait(self) -> None:
        """Wait for the save to end, well or not."""
        self._wait(self._fact)

    def result(self) -> T:
        """Wait for the save to end: what its function returned, or the error that it raised."""
        outcome = self._wait(self._fact)
        assert isinstance(outcome, Outcome), f"save {self._index} ended with {outcome!r}"
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # type: ignore[return-value]

    @property
    def _fact(self) -> Fact:
        return Fact("save ended", self._index)


class Saver:
    """Runs jobs `Fact("save", 0)`, `Fact("save", 1)`, ... in order; posts `Fact("save ended", index)` for each."""

    def __init__(self, store: HostStore, board: Board, ordering: Ordering) -> None:
        self._store = store
        self._board = board
        self._ordering = ordering
        self.thread = threading.Thread(target=self._main, name="torchround saver", daemon=True)

    def _main(self) -> None:
        index = 0
        try:
            while True:
                fact = Fact("save", index)
                job: SaveJob = self._board.wait(fact)
                self._run(index, job)
                self._board.forget(fact)
                index += 1
        except Stopped:
            pass
        finally:
            self._ordering.saver_ended()

    def _run(self, index: int, job: SaveJob) -> None:
        """A save that fails is its caller's to tell: training goes on."""
        state = self._ordering.before_save(job.step)
        source = SaveSource(self._store, self._board, self._ordering, index, job.step, state)
        try:
            outcome = Outcome(job.write(source))
        except Exception as error:  # noqa: BLE001  (raised where the save's result is asked for)
            outcome = Outcome(error=error)
        source.finish_reading()
        self._board.forget(Fact("save may be published", index))
        self._board.post(Fact("save ended", index), outcome)

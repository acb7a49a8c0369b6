"""One thread that lets saves read the host store beside training, between two updates of each bundle.

A save's own work (files, checksums, the disk) is its caller's function. This thread gives the function the
store as it is after a certain step, and lets the next update of a bundle begin as soon as the function has
read it. The optimizer's thread cannot do this: it has gradients to add up while the save waits for a disk.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from torchround.engine.board import Board, HandOver, WaitForHandOver
from torchround.engine.errors import Stopped
from torchround.engine.ordering import Ordering
from torchround.engine.store.host_store import HostStore

T = TypeVar("T")


class SaveSource:
    """The store after `step` steps, for the saving thread to read, and the calls by which it reports its progress.

    `state` is what `HostStore.resume` needs besides `tensors`.
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
        # By bundle: tensors still to be read. The last one frees the bundle for its next update (ordering
        # rule 6).
        self._unread = Counter(self._bundle_of.values())

    def raise_if_abandoned(self) -> None:
        """Report progress between two pieces of work. Raises `Stopped` if the engine has ended."""
        self._board.note_progress()
        self._board.raise_if_stopped()

    def reading(self, tensor: Tensor) -> None:
        """Announce that the tensor's bytes are about to be read."""
        self._board.observer.touched(reads=[tensor], writes=())

    def finished_reading(self, name: str) -> None:
        """Declare that the named tensor is not read again. After its last one, a bundle may be updated."""
        bundle = self._bundle_of.pop(name, None)
        if bundle is None:
            return
        self._unread[bundle] -= 1
        if not self._unread[bundle]:
            self._ordering.read_by_save(bundle, self.step, self._index)

    def before_publishing(self) -> None:
        """Declare that no tensor is read again, and wait for `PendingSave.may_publish`.

        Raises `Stopped` if the engine has ended, even if publishing was allowed before: the thread that ended
        the engine may be working on these files by now.
        """
        # Before the wait, which may last several steps: no update has to wait for it too.
        self.finish_reading()
        self._board.wait(MAY_PUBLISH(self._index))
        self._board.raise_if_stopped()

    def finish_reading(self) -> None:
        """Declare that tensors that were not read so far will not be."""
        for name in list(self._bundle_of):
            self.finished_reading(name)


# A save: the step after which the store is saved, and the function that does it.
SAVE = HandOver[tuple[int, Callable[[SaveSource], object]]]("save {0}")
MAY_PUBLISH = HandOver[None]("save {0} to be allowed to appear")
# What the function returned, or what it raised.
SAVE_ENDED = HandOver[tuple[object, Exception | None]]("the end of save {0}")


class PendingSave(Generic[T]):
    """A save under way beside training."""

    def __init__(self, index: int, board: Board, wait: WaitForHandOver) -> None:
        self._index = index
        self._board = board
        self._wait = wait

    @property
    def ended(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self._board.ready(SAVE_ENDED(self._index))

    def may_publish(self) -> None:
        """Let the checkpoint appear: everything that must be on record before it counts is on record.

        May be called again, and after the save has ended.
        """
        self._board.signal(MAY_PUBLISH(self._index))

    def wait(self) -> None:
        """Wait for the save to end, well or not."""
        self._wait(SAVE_ENDED(self._index))

    def result(self) -> T:
        """Wait for the save to end. Returns what its function returned, or raises what it raised."""
        value, error = self._wait(SAVE_ENDED(self._index))
        if error is not None:
            raise error
        return cast(T, value)


def saver_thread(store: HostStore, board: Board, ordering: Ordering) -> threading.Thread:
    """Return the thread that runs saves `SAVE(0)`, `SAVE(1)`, ... one after the other."""
    return threading.Thread(
        target=_run_saves, args=(store, board, ordering), name="torchround saver", daemon=True
    )


def _run_saves(store: HostStore, board: Board, ordering: Ordering) -> None:
    index = 0
    try:
        while True:
            step, write = board.wait(SAVE(index))
            source = SaveSource(store, board, ordering, index, step, ordering.before_save(step))
            _run_save(board, source, index, write)
            board.forget(SAVE(index))
            index += 1
    except Stopped:
        pass
    finally:
        # Also after an error: an update under way would otherwise wait for this thread for ever.
        ordering.saver_ended()


def _run_save(board: Board, source: SaveSource, index: int, write: Callable[[SaveSource], object]) -> None:
    """Run one save. An error is for the caller of `PendingSave.result`: training continues."""
    try:
        outcome: tuple[object, Exception | None] = write(source), None
    except Exception as error:  # noqa: BLE001  (raised where the save's result is asked for)
        outcome = None, error
    # Also after an error, or an update would wait for tensors that are never read.
    source.finish_reading()
    board.forget(MAY_PUBLISH(index))
    board.post(SAVE_ENDED(index), outcome)

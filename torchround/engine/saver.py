"""Saves beside training: one thread lets them read the host store between two updates of each bundle.

A save's own work (files, checksums, the disk) is its caller's function. The next update of a bundle begins as soon as the
function has read it. The optimizer's thread cannot do this: it has gradients to add up while the save waits for a disk.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from torchround.engine.board import Board, Flag
from torchround.engine.errors import PipelineError
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access, Task

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Save(Generic[T]):
    """A save beside training, by `task`. `write(save)` does it, on the saver's thread.

    For `write` it is the store after `step` steps, `tensors` and `state`, and a `SaveWatch` (`checkpoint/tensor_file.py`).
    """

    store: HostStore
    board: Board
    write: "Callable[[Save[T]], T]"
    wait_for: Callable[[Flag, object], None]
    task: Task = field(init=False)
    step: int = field(init=False)
    state: dict[str, Any] = field(init=False)
    tensors: dict[str, Tensor] = field(init=False)
    _may_publish: Flag = field(default_factory=Flag, init=False)
    _outcome: Future[T] = field(default_factory=Future, init=False)
    # By name: the names of the bundle's tensors that are not read yet, and the accesses to its memory.
    _unread: dict[str, tuple[set[str], list[Access]]] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Run the save. An error is for the caller of `result`, one before `write` as a `PipelineError`: training continues."""
        is_open = False
        try:
            self.step, self.state, self.tensors = self.task.step, self.store.resume_state(), {}
            # Its accesses, by the tensors that they are for.
            records, *accesses = self.task.accesses
            records.end(self.board)
            each = len(accesses) // max(len(self.store.owned), 1)
            for bundle in self.store.bundles:
                views = self.store.bundle_views(bundle, self.step)
                self.tensors |= views
                if bundle.trainable and bundle.is_owned:
                    own, accesses = accesses[:each], accesses[each:]
                    self._unread |= dict.fromkeys(views, (set(views), own))
            is_open = True
            self._outcome.set_result(self.write(self))
        except Exception as error:  # noqa: BLE001  (raised where the save's result is asked for)
            self._outcome.set_exception(error if is_open else PipelineError.of(error, self.task.location))
        self.tensors, self._unread = {}, {}  # the caller may keep the save for long

    # What `write` calls, as a `SaveWatch`.

    def raise_if_abandoned(self) -> None:
        self.board.note_progress()

    def reading(self, tensor: Tensor) -> None:
        self.board.observer.touched(reads=[tensor], writes=())

    def finished_reading(self, name: str) -> None:
        unread, accesses = self._unread.pop(name, (set[str](), []))
        unread.discard(name)
        for access in accesses if not unread else ():
            access.end(self.board)

    def finish_reading(self) -> None:
        for name in list(self._unread):
            self.finished_reading(name)

    def before_publishing(self) -> None:
        """Wait for `may_publish`. Raises `Stopped` if the engine has ended."""
        # Before the wait, which may last several steps: no update has to wait for it too.
        self.finish_reading()
        self.board.wait_for(self._may_publish, "the save to be allowed to appear")
        # Even if it was allowed before: the thread that ended the engine may be working on these files by now.
        self.board.raise_if_stopped()

    # What the caller of `Engine.save` calls.

    @property
    def ended(self) -> bool:
        return self.task.happened

    def may_publish(self) -> None:
        """Let the checkpoint appear. May be called again, and after the save has ended."""
        self.board.happen(self._may_publish)

    def wait(self) -> None:
        self.wait_for(self.task, "the end of a save")

    def result(self) -> T:
        self.wait()
        return self._outcome.result()

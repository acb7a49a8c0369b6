"""The passes that an engine has dispatched and not yet forgotten."""

from collections.abc import Callable, Sequence

from torchround.engine.board import Board, HandOverKey, WaitForHandOver
from torchround.engine.device import Event
from torchround.engine.exchange.step_exchange import StepExchange
from torchround.engine.ordering import Ordering
from torchround.engine.passes import PassShape, uploads
from torchround.engine.results import StepResult
from torchround.engine.store.host_store import HostStore

# The next step is dispatched while one runs; more would only hold more boundary activations.
MOST_PASSES_UNDER_WAY = 2


class PassesUnderWay:
    """The results of at most two passes, whose hand-overs are forgotten once no thread can ask for them again."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        exchange: StepExchange,
        wait: WaitForHandOver,
        wait_for_event: Callable[[HandOverKey[Event]], object],
    ) -> None:
        self._store = store
        self._board = board
        self._ordering = ordering
        self._exchange = exchange
        self._wait = wait
        self._wait_for_event = wait_for_event
        self._results: list[StepResult] = []
        self._earlier_calls: list[StepResult] = []  # of a step whose last pass is still among the results

    def add(self, result: StepResult) -> None:
        """Take a pass that is dispatched."""
        self._results.append(result)

    def add_directions(self, slots: Sequence[int]) -> None:
        """Take the slots of direction jobs that are handed out with the newest pass, or after it."""
        if slots:
            self._results[-1].direction_slots += tuple(slots)

    def make_room(self, step: int) -> None:
        """Wait for the pass before the last, and forget hand-overs that no thread will ask for again.

        `step` is the step that the next pass belongs to, so its update cannot be waited for yet.
        """
        while len(self._results) >= MOST_PASSES_UNDER_WAY:
            self._end(self._results.pop(0), step)
        if self._results:
            # All passes before this one have ended, with the updates of all steps before its own.
            self._results[0].forget_before(self._board, self._ordering)

    def _end(self, result: StepResult, step: int) -> None:
        # Only the last pass of a step waits for its update. Otherwise the next step could not begin beside it.
        is_last = result.step < step and not (self._results and self._results[0].step == result.step)
        is_open = result.pass_.training and not is_last
        result.collect(is_open)
        if is_open:
            self._earlier_calls.append(result)
        if is_last:
            # Their report is about to be forgotten. The last pass of the step may have been an evaluation.
            for call in self._earlier_calls:
                call.update()
            self._earlier_calls.clear()
        self._exchange.collected(result.pass_, self._wait)
        # Rule 1 would remember an evaluation's uploads until the next update, and there may be none for long. The same
        # holds for a step of many calls.
        if is_open or not result.pass_.training:
            ended = uploads(self._store, result.pass_, result.tasks)
            self._ordering.finish_uploads(ended, self._wait_for_event)

    @property
    def last_shape(self) -> PassShape | None:
        """The shape of the last pass, None if none is known."""
        return self._results[-1].pass_.shape if self._results else None

    def wait(self) -> None:
        """Wait for the losses of all passes, and until each stage task is enqueued."""
        for result in self._results:
            result.wait()

    def keep(self) -> None:
        """Take the losses out of the engine's pool, which is about to close."""
        for result in self._results:
            result.keep()

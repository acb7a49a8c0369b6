"""The passes that an engine has dispatched and not yet forgotten."""

from collections.abc import Sequence

from torchround.engine.board import Board
from torchround.engine.passes import PassShape
from torchround.engine.results import StepResult

# The next step is dispatched while one runs; more would only hold more boundary activations.
MOST_PASSES_UNDER_WAY = 2


class PassesUnderWay:
    """The results of at most two passes, whose hand-overs are forgotten once no thread can ask for them again."""

    def __init__(self, board: Board) -> None:
        self._board = board
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
            self._results[0].forget_before(self._board)

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

"""Who may read or write what, when: facts that one thread posts and others wait for, and the six rules.

All hand-overs between the controller, the device workers and the optimizer worker go through one `Board`.
`Ordering` builds the five rules of RoundPipe section 4.3 on it, per bundle of parameters (DESIGN section 7), and
one for saves beside training.
An optional observer sees every hand-over; the race checker rebuilds the happens-before order from that.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchround.engine.board import SAVER_ENDED, Board, Fact
from torchround.engine.device import Event
from torchround.engine.errors import Stopped


class Ordering:
    """The six ordering rules, one method each, named for what the caller is about to do.

    `versions` is the number of master buffers a bundle has: version `v` lives in buffer `v % versions`.
    """

    def __init__(self, board: Board, versions: int) -> None:
        self._board = board
        self._versions = versions
        self._uses: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._uses_lock = threading.Lock()
        self._contributions: dict[tuple[int, int], int] = {}
        self._saves: dict[tuple[int, int], list[int]] = defaultdict(list)

    def begin(self, bundles: Sequence[int], step: int) -> None:
        """The store holds every version that step `step` and later ones may read, and nothing is under way."""
        for bundle in bundles:
            for version in range(step - self._versions + 1, step + 1):
                self._board.post(Fact("weights", version, (bundle,)))
            self._board.post(Fact("gradient consumed", step - 1, (bundle,)))

    def expect_upload(self, bundle: int, version: int, use: int) -> None:
        """The controller announces, before dispatch, an upload that will read `version`."""
        self._uses[version, bundle].append(use)

    def expect_gradient(self, bundle: int, step: int, contributions: int) -> None:
        """The controller announces, before dispatch, how many downloads make up a step's gradient."""
        self._contributions[step, bundle] = contributions

    def before_master_write(self, bundle: int, version: int) -> None:
        """Rule 1: `version` overwrites an older one only after every upload of that one has finished."""
        overwritten = version - self._versions
        with self._uses_lock:
            uses = self._uses.pop((overwritten, bundle), [])
        for use in uses:
            fact = Fact("uploaded", overwritten, (bundle, use))
            self._board.synchronize(self._board.wait(fact), fact)

    def before_upload(self, bundle: int, version: int) -> None:
        """Rule 2: an upload of `version` starts only after that version is complete."""
        self._board.wait(Fact("weights", version, (bundle,)))

    def may_upload(self, bundle: int, version: int) -> bool:
        """Whether `before_upload` would return at once."""
        return self._board.ready(Fact("weights", version, (bundle,)))

    def uploaded(self, bundle: int, version: int, use: int, event: Event) -> None:
        self._board.post(Fact("uploaded", version, (bundle, use)), event)

    def finish_uploads(
        self, version: int, uploads: Iterable[tuple[int, int]], wait: Callable[[Fact], Any]
    ) -> None:
        """Wait for uploads `(bundle, use)` that were posted, and forget them: no update has to wait any more.

        `wait` also waits for the event that the fact is posted with.
        """
        for bundle, use in uploads:
            fact = Fact("uploaded", version, (bundle, use))
            with self._uses_lock:
                uses = self._uses.get((version, bundle), [])
                if use not in uses:
                    continue  # an update is at it already
                uses.remove(use)
            wait(fact)
            self._board.forget(fact)

    def before_gradient_read(self, bundle: int, step: int, contribution: int) -> Any:
        """Rule 3: the optimizer reads a gradient only after its download has finished.

        Returns what `gradient_landed` was given.
        """
        fact = Fact("gradient landed", step, (bundle, contribution))
        event, landing = self._board.wait(fact)
        self._board.synchronize(event, fact)
        return landing

    def before_gradient_write(self, bundle: int, step: int, previous_part: int) -> None:
        """Rule 4: a download writes a gradient only after the optimizer consumed the one before it.

        `previous_part` is the part that the round before made, negative in a step's first round.
        """
        self._board.wait(_consumed(bundle, step, previous_part))

    def may_write_gradient(self, bundle: int, step: int, previous_part: int) -> bool:
        """Whether `before_gradient_write` would return at once."""
        return self._board.ready(_consumed(bundle, step, previous_part))

    def gradient_landed(self, bundle: int, step: int, contribution: int, event: Event, landing: Any) -> None:
        self._board.post(Fact("gradient landed", step, (bundle, contribution)), (event, landing))

    def contributions(self, bundle: int, step: int) -> int:
        return self._contributions[step, bundle]

    def part_consumed(self, bundle: int, step: int, part: int) -> None:
        """A part of a gradient is in its sum."""
        self._board.post(Fact("part consumed", step, (bundle, part)))

    def before_update(self, bundle: int, step: int) -> None:
        """Rule 5: update `step + 1` of a bundle starts only after update `step` of it is complete."""
        self._board.wait(Fact("weights", step, (bundle,)))

    def expect_save(self, bundles: Sequence[int], version: int, save: int) -> None:
        """The controller announces, before it dispatches what makes version `version + 1`, a save of `version`."""
        for bundle in bundles:
            self._saves[version, bundle].append(save)

    def before_overwriting_saved(self, bundle: int, version: int) -> None:
        """Rule 6: what a save of `version` reads of a bundle is overwritten only after it was read.

        An update cannot stop half-way: after a stop this returns as soon as no save reads any more.
        """
        for save in self._saves.pop((version, bundle), ()):
            fact = Fact("read by save", version, (bundle, save))
            try:
                self._board.wait(fact)
                self._board.forget(fact)
            except Stopped:
                self._board.outlast(SAVER_ENDED)

    def before_save(self, version: int) -> Any:
        """A save of `version` begins only after all of it is complete. Returns what `settled` was given."""
        return self._board.wait(Fact("settled", version))

    def settled(self, version: int, state: Any) -> None:
        """Every bundle is at `version`; `state` is what belongs to it besides."""
        self._board.post(Fact("settled", version), state)

    def read_by_save(self, bundle: int, version: int, save: int) -> None:
        self._board.post(Fact("read by save", version, (bundle, save)))

    def saver_ended(self) -> None:
        """No save reads anything any more, nor ever will."""
        self._board.post(SAVER_ENDED)

    def gradient_consumed(self, bundle: int, step: int) -> None:
        """Nobody will read step `step`'s gradient any more."""
        self._contributions.pop((step, bundle), None)
        self._board.post(Fact("gradient consumed", step, (bundle,)))

    def updated(self, bundle: int, step: int) -> None:
        """Version `step + 1` is complete."""
        self._board.post(Fact("weights", step + 1, (bundle,)))

    def retire(self, below: int) -> None:
        """Forget versions and steps that nobody will ask for again."""
        self._board.retire(
            ("weights", "uploaded", "gradient landed", "gradient consumed", "part consumed", "settled"), below
        )


def _consumed(bundle: int, step: int, previous_part: int) -> Fact:
    if previous_part < 0:
        return Fact("gradient consumed", step - 1, (bundle,))
    return Fact("part consumed", step, (bundle, previous_part))

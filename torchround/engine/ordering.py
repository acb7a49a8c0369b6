"""The ten ordering rules: which thread may read or write what, and when.

Rules 1 to 5 are those of the RoundPipe paper (section 4.3), kept per bundle of parameters; rule 6 is for
saves beside training, rules 7 and 8 are for several machines, rules 9 and 10 for directions that devices compute for
the optimizer. Each rule is one method of `Ordering`, and each has tests that fail without it.

| rule | who waits | until |
|---|---|---|
| 1 | the optimizer, before it overwrites a weight version | every upload of that version has finished |
| 2 | a device, before it uploads a weight version | the optimizer has completed that version |
| 3 | the optimizer, before it reads a gradient | its download has finished |
| 4 | a device, before it writes a gradient | the optimizer has consumed the gradient before it |
| 5 | the optimizer, before it updates a bundle | the previous update of that bundle is complete |
| 6 | the optimizer, before it overwrites a version being saved | the save has read it |
| 7 | the optimizer, before it overwrites a version being sent to other machines | all of them have been sent it |
| 8 | a device, before it writes a gradient into the landing window | the parts that were there are consumed |
| 9 | a device, before it uploads a look-ahead | the optimizer has written it |
| 10 | the optimizer, before it reads a direction, and before it writes the next look-ahead in its place | its download has finished |

All hand-overs between threads, rules included, go through one `Board`. These are their kinds. (C is the
controller, which is the caller's thread; D a device worker; O the optimizer worker; R a device's reader of
files; S the saver; G a sender of gradients; W a sender or receiver of weights.)

| kind | defined in | key | carries | from | to |
|---|---|---|---|---|---|
| `FIRST_SIZES` | `passes.py` | 0 | `StagingSizes` of the first pass | C | D |
| `STAGE_JOB` | `passes.py` | slot | `StageJob` or `DirectionJob` | C | D |
| `DIRECTIONS_ENQUEUED` | `direction_jobs.py` | slot | nothing | D | C |
| `TRAINING_PASS` | `passes.py` | step | `Pass`, whose gradients O adds up | C | O |
| `NEXT_CALL` | `update_report.py` | step, call | another `Pass` of the step, or None at its end | C | O |
| `CALL_ADDED` | `update_report.py` | pass | nothing: its gradients and losses are in the sums | O | C |
| `BOUNDARY` | `worker/activation_transfers.py` | pass, layer, micro-batch | `HostTensors`: input of a stage | D | D |
| `BOUNDARY_GRADIENT` | `worker/activation_transfers.py` | pass, layer, micro-batch | `HostTensors`: its gradient | D | D |
| `KEPT` | `worker/kept_transfers.py` | pass, layer, micro-batch | `HostTensors` that the layer keeps, or None | D | D |
| `LOSS` | `worker/activation_transfers.py` | pass, micro-batch | `HostTensors`: sum of token losses | D | C, O |
| `OUTPUT` | `worker/activation_transfers.py` | pass, micro-batch | `HostTensors`: what the last layer returned | D | C |
| `FILE_RANGES` | `worker/file_reader.py` | upload, device | ranges of weights in files, to be read | D | R |
| `FILE_BUFFER` | `worker/file_reader.py` | buffer, device | content of the next range | R | D |
| `FILE_BUFFER_UPLOADED` | `worker/file_reader.py` | buffer, device | `Event` of its upload | D | R |
| `STAGE_ENQUEUED` | `results.py` | slot | report of the stage slot | D | C |
| `LEARNING_RATE` | `update_report.py` | step | `float` | C | O |
| `HYPERPARAMETERS` | `host_updates.py` | step | those of each group of a `HostOptimizer` | C | O |
| `UPDATED` | `update_report.py` | step | `UpdateReport` | O | C |
| `SAVE` | `saver.py` | save | step and function that writes | C | S |
| `MAY_PUBLISH` | `saver.py` | save | nothing | C | S |
| `SAVE_ENDED` | `saver.py` | save | result or error | S | C |
| `UPLOADED` | here, rule 1 | version, bundle, use | `Event` of the upload | D | O, C |
| `WEIGHTS` | here, rules 2 and 5 | version, bundle | nothing | O | D, O |
| `GRADIENT_LANDED` | here, rule 3 | step, bundle, part | `Event` of the download, its buffer | D | O |
| `GRADIENT_CONSUMED` | here, rule 4 | step, bundle | nothing | O | D |
| `PART_CONSUMED` | here, rule 4 | step, bundle, part | nothing | O | D |
| `LOOK_AHEAD` | here, rule 9 | step, bundle | nothing | O | D |
| `DIRECTION_LANDED` | here, rule 10 | step, bundle | `LandedDirection`, with the `Event` of its download | D | O |
| `SETTLED` | here, before a save | version | state beside the weights | O | S, C |
| `READ_BY_SAVE` | here, rule 6 | version, bundle, save | nothing | S | O |
| `SAVER_ENDED` | here, rule 6 | 0 | nothing | S | O |
| `SENT` | here, rule 7 | version, bundle, machine | nothing | W | O, C |
| `SHARE` | `exchange/step_exchange.py` | step, machine | `StepShare` whose gradients G sends | C | G |
| `SUMS` | `exchange/step_exchange.py` | step | losses and norms of all machines | O | C |
| `WEIGHT_JOB` | `exchange/weights.py` | exchange, thread | the version to send and receive | O, C | W |
| `REWRITTEN` | `exchange/weights.py` | exchange, thread | nothing | W | C |
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torchround.engine.board import Board, HandOver, HandOverKey
from torchround.engine.device import Event
from torchround.engine.direction_jobs import LandedDirection
from torchround.engine.errors import Stopped
from torchround.engine.store.host_memory import HostBuffer

UPLOADED = HandOver[Event]("upload {2} of version {0} of bundle {1} (ordering rule 1)")
WEIGHTS = HandOver[None]("version {0} of bundle {1} (ordering rule 2 or 5)")
# The buffer is None if the download went into the bundle's own gradient.
GRADIENT_LANDED = HandOver[tuple[Event, HostBuffer | None]](
    "part {2} of step {0}'s gradient of bundle {1} (ordering rule 3)"
)
GRADIENT_CONSUMED = HandOver[None](
    "the optimizer to be done with step {0}'s gradient of bundle {1} (ordering rule 4)"
)
PART_CONSUMED = HandOver[None](
    "the optimizer to have added part {2} of step {0}'s gradient of bundle {1} (ordering rule 4)"
)
LOOK_AHEAD = HandOver[None]("the look-aheads of step {0} of bundle {1} (ordering rule 9)")
DIRECTION_LANDED = HandOver[LandedDirection]("the directions of step {0} of bundle {1} (ordering rule 10)")
SETTLED = HandOver[Mapping[str, object]]("version {0} of every bundle, to save it")
READ_BY_SAVE = HandOver[None]("save {2} to have read version {0} of bundle {1} (ordering rule 6)")
SAVER_ENDED = HandOver[None]("the end of the saver")
SENT = HandOver[None]("version {0} of bundle {1} to be sent to machine {2} (ordering rule 7)")


class Ordering:
    """The ten ordering rules, one method each, named for what the caller is about to do.

    `versions` is the number of device-weight buffers of a bundle: version `v` is in buffer `v % versions`.
    """

    def __init__(self, board: Board, versions: int) -> None:
        self._board = board
        self._versions = versions
        # By version and bundle: uploads that rule 1 has to wait for. The controller adds and removes, the
        # optimizer takes; hence the lock.
        self._uses: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._finished: set[tuple[int, int]] = set()
        self._uses_lock = threading.Lock()
        self._saves: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._sendings: dict[tuple[int, int], Sequence[int]] = {}
        self._overlapped: Mapping[int, Sequence[tuple[int, int]]] = {}
        self._num_machines = 1

    def begin(self, bundles: Sequence[int], step: int, lagging: Collection[int] = ()) -> None:
        """Declare that the store holds every version that `step` and later steps may read, and that nothing runs.

        The device weights of `lagging` bundles are of version `step - 1`: their next update writes those of `step`.
        """
        for bundle in bundles:
            newest = step - (bundle in lagging)
            # At step 0 the older versions have negative numbers. They equal version
            # 0, and nothing waits for them.
            for version in range(newest - self._versions + 1, newest + 1):
                self._board.signal(WEIGHTS(version, bundle))
            self._board.signal(GRADIENT_CONSUMED(step - 1, bundle))

    # Rule 1.

    def expect_upload(self, bundle: int, version: int, use: int) -> None:
        """Announce an upload that will read `version`. The controller calls this before it hands out the stage job.

        If a device announced it, the optimizer could pass rule 1 before the device came to it.
        """
        with self._uses_lock:
            self._uses[version, bundle].append(use)

    def before_device_weight_write(self, bundle: int, version: int) -> None:
        """Rule 1: wait until every upload of the version that `version` overwrites has finished."""
        overwritten = version - self._versions
        with self._uses_lock:
            uses = self._uses.pop((overwritten, bundle), [])
            if (overwritten, bundle) in self._finished:
                self._finished.remove((overwritten, bundle))
                self._board.observer.waited(("uploads finished", overwritten, bundle))
        for use in uses:
            key = UPLOADED(overwritten, bundle, use)
            self._board.synchronize(self._board.wait(key), key)

    def uploaded(self, bundle: int, version: int, use: int, event: Event) -> None:
        """Post that an upload is enqueued; it has finished after `event`."""
        self._board.post(UPLOADED(version, bundle, use), event)

    def finish_uploads(
        self, uploads: Iterable[tuple[int, int, int]], wait: Callable[[HandOverKey[Event]], object]
    ) -> None:
        """Wait for announced uploads `(bundle, version, use)` and forget them, so that no update has to wait for them.

        `wait` waits for the hand-over and for the event that it carries.
        """
        for bundle, version, use in uploads:
            key = UPLOADED(version, bundle, use)
            with self._uses_lock:
                uses = self._uses.get((version, bundle), [])
                if use not in uses:
                    continue  # an update has taken it over already
                uses.remove(use)
                # The caller has the pass's losses, and the uploads came before those. An update of a step in which
                # this machine's devices had no part learns of their end from here alone.
                self._finished.add((version, bundle))
                self._board.observer.posted(("uploads finished", version, bundle))
            wait(key)
            self._board.forget(key)

    def uploads_of(self, bundle: int, version: int) -> list[tuple[int, int, int]]:
        """Return the announced uploads of a version that no update has waited for yet, as `finish_uploads` takes them."""
        with self._uses_lock:
            return [(bundle, version, use) for use in self._uses.get((version, bundle), ())]

    def before_rewrite(
        self, bundle: int, version: int, newest: int, wait: Callable[[HandOverKey[Event]], object]
    ) -> None:
        """Rules 1 and 6 for the controller: wait until `version`, in the buffer to be written, is not read any more.

        A save of the `newest` version reads the buffer too if `version` is an older one.
        """
        self.finish_uploads(self.uploads_of(bundle, version), wait)
        if version < newest:
            self.before_overwriting_saved(bundle, newest)

    # Rules 2 and 5.

    def before_upload(self, bundle: int, version: int) -> None:
        """Rule 2: wait until `version` is complete."""
        self._board.wait(WEIGHTS(version, bundle))

    def may_upload(self, bundle: int, version: int) -> bool:
        """Tell whether `before_upload` would return at once."""
        return self._board.ready(WEIGHTS(version, bundle))

    def before_update(self, bundle: int, step: int) -> None:
        """Rule 5: wait until the update before step `step`'s is complete for this bundle."""
        self._board.wait(WEIGHTS(step, bundle))

    def updated(self, bundle: int, step: int) -> None:
        """Post that version `step + 1` of the device weights is complete."""
        self._board.signal(WEIGHTS(step + 1, bundle))

    # Rules 3 and 4. A step's gradient arrives in parts: one for each round, of all calls of the step, and
    # each layer that uses the bundle.

    def before_gradient_read(self, bundle: int, step: int, part: int) -> HostBuffer | None:
        """Rule 3: wait until the download of this part has finished. Returns the buffer given to `gradient_landed`."""
        key = GRADIENT_LANDED(step, bundle, part)
        event, landing = self._board.wait(key)
        self._board.synchronize(event, key)
        return landing

    def gradient_landed(
        self, bundle: int, step: int, part: int, event: Event, landing: HostBuffer | None
    ) -> None:
        """Post that a download into `landing` is enqueued; it has finished after `event`."""
        self._board.post(GRADIENT_LANDED(step, bundle, part), (event, landing))

    def before_gradient_write(self, bundle: int, step: int, previous_part: int) -> None:
        """Rule 4: wait until the optimizer has consumed the gradient before this one.

        That is the previous round's part, `previous_part`, or the previous step's gradient if `previous_part`
        is negative, as in a step's first round. It protects `Bundle.gradient` and bounds the pool's buffers
        for parts. Rule 8 is the same for other bundles whose parts had the memory before.
        """
        self._board.wait(_consumed(bundle, step, previous_part))
        for key in self._before_landing(bundle, step, previous_part):
            self._board.wait(key)

    def may_write_gradient(self, bundle: int, step: int, previous_part: int) -> bool:
        """Tell whether `before_gradient_write` would return at once."""
        keys = self._before_landing(bundle, step, previous_part)
        return self._board.ready(_consumed(bundle, step, previous_part)) and all(map(self._board.ready, keys))

    def part_consumed(self, bundle: int, step: int, part: int) -> None:
        """Post that a part of a gradient is in its sum."""
        self._board.signal(PART_CONSUMED(step, bundle, part))

    def gradient_consumed(self, bundle: int, step: int) -> None:
        """Post that the optimizer will not read step `step`'s gradient again."""
        self._board.signal(GRADIENT_CONSUMED(step, bundle))

    # Rule 8.

    def limit_landings(self, overlapped: Mapping[int, Sequence[tuple[int, int]]], num_machines: int) -> None:
        """Let parts of bundles land in common memory: `overlapped` gives, by bundle, whose parts were there before.

        Each is a bundle and the rounds of this machine between the two parts, 0 or 1. All have one part a round.
        """
        self._overlapped, self._num_machines = overlapped, num_machines

    def _before_landing(self, bundle: int, step: int, previous_part: int) -> list[HandOverKey[None]]:
        """Rule 8: return what must be consumed before a part of this bundle may land."""
        return [
            _consumed(other, step, previous_part + (1 - rounds) * self._num_machines)
            for other, rounds in self._overlapped.get(bundle, ())
        ]

    # Rule 6.

    def expect_save(self, bundles: Sequence[int], version: int, save: int) -> None:
        """Announce a save of `version`. The controller calls this before it dispatches the next update."""
        for bundle in bundles:
            self._saves[version, bundle].append(save)

    def before_overwriting_saved(self, bundle: int, version: int) -> None:
        """Rule 6: wait until every save of `version` has read this bundle.

        An update cannot stop half-way. After a stop this therefore returns, but not before the saver has
        ended and reads no more.
        """
        for save in self._saves.pop((version, bundle), ()):
            key = READ_BY_SAVE(version, bundle, save)
            try:
                self._board.wait(key)
                self._board.forget(key)
            except Stopped:
                self._board.outlast(SAVER_ENDED(0))

    def before_save(self, version: int) -> Mapping[str, object]:
        """Wait until `version` of every bundle is complete. Returns the state given to `settled`."""
        return self._board.wait(SETTLED(version))

    def settled(self, version: int, state: Mapping[str, object]) -> None:
        """Post that every bundle is at `version`; `state` is what a save of it needs beside the tensors."""
        self._board.post(SETTLED(version), state)

    def read_by_save(self, bundle: int, version: int, save: int) -> None:
        """Post that a save has read this bundle."""
        self._board.signal(READ_BY_SAVE(version, bundle, save))

    def saver_ended(self) -> None:
        """Post that no save reads anything any more, nor ever will."""
        self._board.signal(SAVER_ENDED(0))

    # Rule 7.

    def expect_sending(self, bundle: int, version: int, machines: Sequence[int]) -> None:
        """Announce that `version` of an owned bundle goes to other machines, before `updated` lets it go."""
        self._sendings[version, bundle] = machines

    def sent(self, bundle: int, version: int, machine: int) -> None:
        """Post that a machine has been sent `version` of a bundle."""
        self._board.signal(SENT(version, bundle, machine))

    def before_overwriting_sent(self, bundle: int, version: int) -> None:
        """Rule 7: wait until every machine has been sent the version that `version` overwrites.

        An update cannot stop half-way. After a stop this returns: the machines drop what they were sent.
        """
        overwritten = version - self._versions
        for machine in self._sendings.pop((overwritten, bundle), ()):
            key = SENT(overwritten, bundle, machine)
            try:
                self._board.wait(key)
            except Stopped:
                return
            self._board.forget(key)

    def sendings(self) -> list[HandOverKey[None]]:
        """Return the announced sendings that no update has waited for yet. Only between steps."""
        return [
            SENT(version, bundle, machine)
            for (version, bundle), machines in self._sendings.items()
            for machine in machines
        ]

    # Rules 9 and 10. A direction comes back into the memory of the look-ahead that it was computed from.

    def before_look_ahead_upload(self, bundle: int, step: int) -> None:
        """Rule 9: wait until the look-aheads of this bundle are written."""
        self._board.wait(LOOK_AHEAD(step, bundle))

    def look_ahead_written(self, bundle: int, step: int) -> None:
        """Post that the look-aheads of this bundle are written."""
        self._board.signal(LOOK_AHEAD(step, bundle))

    def before_direction_read(self, bundle: int, step: int) -> LandedDirection:
        """Rule 10: wait until the download of the directions has finished. The look-aheads may be overwritten then too."""
        key = DIRECTION_LANDED(step, bundle)
        landed = self._board.wait(key)
        self._board.synchronize(landed.event, key)
        return landed

    def direction_landed(self, bundle: int, step: int, landed: LandedDirection) -> None:
        """Post that the download of the directions is enqueued; it has finished after the event of `landed`."""
        self._board.post(DIRECTION_LANDED(step, bundle), landed)

    def retire(self, below: int) -> None:
        """Forget versions and steps under `below`, which no thread will ask for again."""
        for kind in (WEIGHTS, GRADIENT_CONSUMED, PART_CONSUMED, LOOK_AHEAD):
            self._board.retire(kind, below)
        self._board.retire(DIRECTION_LANDED, below)
        self._board.retire(UPLOADED, below)
        self._board.retire(GRADIENT_LANDED, below)
        self._board.retire(SETTLED, below)


def _consumed(bundle: int, step: int, previous_part: int) -> HandOverKey[None]:
    """Return what frees the buffer: the previous step's whole gradient, or the previous round's part of this one."""
    if previous_part < 0:
        return GRADIENT_CONSUMED(step - 1, bundle)
    return PART_CONSUMED(step, bundle, previous_part)

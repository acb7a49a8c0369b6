"""The update modes, in facts: the age of the weights that a step computes with, and the moment when they are updated.

This is the one table of modes. The config, the planner, the simulation and the engine ask it for facts, not for names. A
mode with other values of these facts is one more entry of `MODES` and of `ModeName`, and a sentence in the docstrings of
`EngineTable.update` and of the library's `Pipeline`; `tests/planning/test_update_modes.py` plans and trains with such a mode.
A mode that these facts do not describe needs one more fact, whose name then finds each place that it decides.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torchround.planning.partition import PlanError

STEPS_UNDER_WAY = 2
"""Steps that are dispatched before the oldest of them has ended, in any mode. Host buffers are counted for pairs of passes
(`HostBatch._pairs`, `BufferReservation.reserve_for`), so more than two would need more than this number."""

ModeName = Literal["sync", "async", "bounded"]
"""The legal values of `engine.update`: the names of `MODES`."""

# The search effort where devices are idle for a part of each step, as at a flush.
FLUSH_EFFORT = 100_000


@dataclass(frozen=True)
class UpdateMode:
    """The facts of one mode. In each, step t's gradient is applied to version v(t) of the weights and gives v(t + 1)."""

    name: str
    """The value of `engine.update`, also in plans and messages."""

    versions: int
    """Versions V of the device weights on the host and in checkpoints, an element of `training.dtype` per trained parameter
    each. Step t reads v(t - V + 1), and the first steps v(0). From 2 on the last gradient delays no step: steps overlap, and
    jobs of devices for the update (Muon) come among the stages of the next step. With V > 2, predicted step
    times do not know `STEPS_UNDER_WAY`, which then bounds the overlap."""

    search_effort: int
    """The most that annealing costs for one number of rounds, in timed stages (`search.py`)."""

    updates_by_layer: bool = False
    """Whether a bundle is updated once its own gradient is whole (PACI), and each stage waits for its own layers alone. The
    first `stale_layers` layers, legal only then, read v(t - 1) in their forward. The norm of the whole gradient comes too late
    to clip by, or to skip a step by: clipping is by layer, and float16 illegal. Steps have one round, and devices no jobs. The
    store keeps fp32 weights, because the device weights of stale layers are one update behind."""

    can_predict: bool = False
    """Whether `engine.delay_correction` is legal, which moves device weights by one update along the optimizer's state."""

    predicts: bool = False
    """Whether a run has it on. The update then writes `w + d` in place of `w` as a version's device weights, where `d` is its
    own direction; for AdamW `d = -lr * m_hat / (sqrt(v_hat) + eps)`. The fp32 weights, state and learning rate give them
    again, bit for bit."""

    def __post_init__(self) -> None:
        assert self.versions == 1 or not self.updates_by_layer, (
            f"{self.name}: updates by layer are of one version"
        )

    @property
    def has_flush(self) -> bool:
        """Whether all devices are idle between two steps: each stage waits for the whole update of the step before."""
        return self.versions == 1 and not self.updates_by_layer

    def overlaps(self, stale_layers: int | None) -> bool:
        """Tell whether a step begins before the last gradient of the one before; None stale layers may be any number."""
        return self.versions > 1 or (self.updates_by_layer and stale_layers != 0)

    @property
    def splits_weights(self) -> bool:
        """Whether device weights are the upper halves of the fp32 weights: neither predicted nor one update behind."""
        return not self.predicts and not self.updates_by_layer

    def with_prediction(self, is_wanted: bool) -> "UpdateMode":
        return replace(self, predicts=is_wanted and self.can_predict)

    def version_read(self, step: int) -> int:
        return max(step - (self.versions - 1), 0)


# The mode of a plain loop, which is the default everywhere, and whose runs need least memory.
SYNC = UpdateMode("sync", versions=1, search_effort=FLUSH_EFFORT)
ASYNC = UpdateMode("async", versions=2, search_effort=7_000, can_predict=True)
ASYNC_PREDICT = ASYNC.with_prediction(True)
BOUNDED = UpdateMode("bounded", versions=1, search_effort=60_000, updates_by_layer=True)
MODES = {mode.name: mode for mode in (SYNC, ASYNC, BOUNDED)}


def mode_of(name: str) -> UpdateMode:
    """Find the mode of a name. Raises `PlanError`."""
    if name not in MODES:
        raise PlanError(f"update = {name!r} must be one of {tuple(MODES)}")
    return MODES[name]


def modes_where(holds: Callable[[UpdateMode], bool]) -> str:
    """Name the modes for which a fact holds, for messages."""
    return " or ".join(f'"{mode.name}"' for mode in MODES.values() if holds(mode))

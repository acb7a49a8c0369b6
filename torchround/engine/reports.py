"""What devices report of their stage slots, and what that says of a step: busy, and waiting for what.

All times come from marks in the compute stream and the upload streams, so on CUDA they are the device's own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torchround.engine.device import Mark
from torchround.pipeline.partition import StageTask
from torchround.pipeline.timeline import TaskKind


@dataclass(frozen=True)
class Piece:
    """One computation of a stage slot for one micro-batch."""

    kind: TaskKind
    micro_batch: int
    start: Mark
    end: Mark


@dataclass(frozen=True)
class SlotReport:
    """One stage slot on its device.

    `idle_since`: end of the slot before it on the same device, None at the first. `weights_ready`: its weights
    have arrived. `optimizer_wait_s`: how long its thread waited for weights to be updated before they could
    be sent. `uploaded_bytes` and `downloaded_bytes` crossed the link while the slot was worked on.
    """

    task: StageTask
    step: int
    idle_since: Mark | None
    weights_ready: Mark
    optimizer_wait_s: float
    pieces: tuple[Piece, ...]
    uploaded_bytes: int
    downloaded_bytes: int

    def times(self) -> "DeviceTimes":
        """Where the time from `idle_since` to the end of the last piece went."""
        busy_s = sum(piece.end.seconds_since(piece.start) for piece in self.pieces)
        between_s = sum(
            max(later.start.seconds_since(earlier.end), 0.0)
            for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)
        )
        before_s = weights_s = 0.0
        if self.idle_since is not None:
            before_s = max(self.pieces[0].start.seconds_since(self.idle_since), 0.0)
            weights_s = min(max(self.weights_ready.seconds_since(self.idle_since), 0.0), before_s)
        optimizer_s = min(self.optimizer_wait_s, weights_s)
        return DeviceTimes(
            busy_s=busy_s,
            waiting_for_input_s=before_s - weights_s + between_s,
            waiting_for_weights_s=weights_s - optimizer_s,
            waiting_for_optimizer_s=optimizer_s,
            uploaded_bytes=self.uploaded_bytes,
            downloaded_bytes=self.downloaded_bytes,
        )


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds that devices computed, and that they stood still for want of something; bytes moved each way."""

    busy_s: float = 0.0
    waiting_for_input_s: float = 0.0
    waiting_for_weights_s: float = 0.0
    waiting_for_optimizer_s: float = 0.0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0

    def __add__(self, other: "DeviceTimes") -> "DeviceTimes":
        return DeviceTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def times_by_device(reports: Iterable[SlotReport], num_devices: int) -> list[DeviceTimes]:
    """The sum of the reports of each device, in device order."""
    times = [DeviceTimes()] * num_devices
    for report in reports:
        times[report.task.device] += report.times()
    return times

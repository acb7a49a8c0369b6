"""Errors of the engine that a caller may catch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchround.errors import EngineError as EngineError  # noqa: PLC0414  (callers of the engine look here)
from torchround.errors import EngineUsageError as EngineUsageError  # noqa: PLC0414


class DeviceMemoryError(EngineError):
    """A device has less memory than the plan's fixed buffers or a computation need."""


class HostMemoryError(EngineError):
    """The system refused host memory that the plan counted as free."""


@dataclass(frozen=True)
class FaultLocation:
    """A location in the pipeline: the thread, and the stage, layers and micro-batch if there are any."""

    actor: str
    stage: str | None = None
    layers: tuple[str, ...] = ()
    micro_batch: int | None = None

    def __str__(self) -> str:
        parts = [self.actor]
        if self.stage is not None:
            span = self.layers[0] if len(self.layers) == 1 else f"{self.layers[0]} .. {self.layers[-1]}"
            parts.append(f"{self.stage} stage ({span})")
        elif self.layers:
            parts.append(", ".join(self.layers))
        if self.micro_batch is not None:
            parts.append(f"micro-batch {self.micro_batch}")
        return ", ".join(parts)


# The end of a message about a store that is not consistent.
MIXED = "the host store mixes two weight versions, do not save it"


class PipelineError(EngineError):
    """A fault inside the pipeline; the engine has stopped and `__cause__` is the original exception.

    `store_is_consistent` is False only if an optimizer update could not be completed: then the host store mixes two
    weight versions and must not be saved. In `bounded` that is the rule for a fault in the middle of a step.
    """

    def __init__(self, location: FaultLocation, problem: str, store_is_consistent: bool = True) -> None:
        super().__init__(f"{location}: {problem}")
        self.location = location
        self.store_is_consistent = store_is_consistent

    @classmethod
    def of(cls, error: BaseException, location: FaultLocation) -> "PipelineError":
        failure = cls(location, f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def add(self, note: str) -> None:
        """Let the text grow in place, because callers may hold this very object already."""
        # The last line of a hang report is about one thread.
        between = "\n" if "\n" in str(self) else " "
        self.args = (f"{self}{between}({note})",)


class HangError(PipelineError):
    """A standstill of `timeout_s` in the engine. `report` says what each thread and device queue waits for."""

    def __init__(self, timeout_s: float, report: Sequence[str]) -> None:
        problem = (
            f"nothing moved for {timeout_s:g} s. Raise engine.hang_timeout_s if a stage takes that long for one "
            "micro-batch, or the optimizer for one layer.\n  What each thread waits for:"
        )
        super().__init__(FaultLocation("controller"), "\n  ".join([problem, *report]))
        self.report = tuple(report)


class Stopped(BaseException):
    """The exception that unwinds an engine thread after the engine stopped. It never reaches a caller.

    It derives from BaseException, so that a layer's own `except Exception` cannot swallow it.
    """

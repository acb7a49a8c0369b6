"""`[trace]`: timelines of chosen steps in the run's folder, and snapshots of device memory beside them."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from torchround.config import TraceTable
from torchround.engine.device import Device
from torchround.engine.results import StepResult
from torchround.engine.tracing import Tracer, write_trace

logger = logging.getLogger(__name__)


class StepTraces:
    """Writes `step-N.json` (for ui.perfetto.dev) and, with `memory`, `step-N-memory.pickle` (pytorch.org/memory_viz).

    `devices` are what the engine must run on. Without any step to trace they are the given ones, and nothing is
    recorded at any time.
    """

    def __init__(self, table: TraceTable, folder: Path, devices: Sequence[Device], total_steps: int) -> None:
        self._steps = frozenset(table.steps)
        self._folder = folder
        self._tracer = Tracer(devices) if self._steps else None
        self.devices: Sequence[Device] = devices if self._tracer is None else self._tracer.devices
        self._memory = table.memory and any(device.torch_device.type == "cuda" for device in devices)
        if table.memory and not self._memory:
            logger.warning("trace.memory: cpu devices have no memory snapshots; only timelines are written")
        if beyond := sorted(step for step in self._steps if step > total_steps):
            logger.warning(
                "trace.steps: %s will not be traced; the run ends after training.steps = %d",
                ", ".join(map(str, beyond)),
                total_steps,
            )

    def wants(self, step: int) -> bool:
        """Whether `step`, counted from 1, is to be traced."""
        return step in self._steps

    def start(self) -> None:
        """Just before a traced step is dispatched; nothing may be under way."""
        assert self._tracer is not None, "no step is to be traced"
        if self._memory:
            torch.cuda.memory._record_memory_history(stacks="python")
        self._tracer.start()

    def finish(self, step: int, result: StepResult) -> None:
        """Wait for the step and write its files. A disk that fails costs the trace, not the step."""
        assert self._tracer is not None, "no step is to be traced"
        timeline = self._tracer.stop(result)
        try:
            write_trace(timeline, f"step {step}", self._folder / f"step-{step}.json")
            if self._memory:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"step-{step}-memory.pickle"))
        except OSError as error:
            logger.warning("the trace of step %d could not be written: %s", step, error)
        finally:
            if self._memory:
                torch.cuda.memory._record_memory_history(enabled=None)

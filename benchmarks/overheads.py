"""What planning, profiling and metrics cost of a step: processor time of each, in a real run of `train.py`.

    python benchmarks/overheads.py                                  # about 1 M parameters
    python benchmarks/overheads.py --model.flavor=debug_25m --training.global_batch_size=8

Arguments are overrides of `configs/debug.toml`. The run logs every step. Waiting costs nothing here: what is counted
is the time that threads spend in these functions, the whole of it, although most runs beside the devices. A step's
cost is the mean over the second half of the run; what the first half takes more (planning, planning again after the
measured steps, allocating, first calls) comes once a run and is shared out over `--amortise` steps. Prints JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from torchround.commands import train_model
from torchround.data.loader import Loader
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.passes import BufferReservation
from torchround.engine.results import DeviceSpan
from torchround.engine.tracing import StepTraces
from torchround.engine.worker.device_worker import DeviceWorker
from torchround.engine.worker.transfers import ActivationTransfers
from torchround.observe import MetricsLogger, StepRecord
from torchround.pipeline.timeline import TaskKind
from torchround.run.run_plan import PlanByMeasuring
from torchround.run.step_meter import StepMeter

CONFIG = Path(__file__).parents[1] / "configs" / "debug.toml"
MARK_TURNS = 20000
# By kind of cost: who is watched, and which of its functions.
WATCHED: dict[str, list[tuple[Any, str]]] = {
    "planning": [(train_model, "plan_for"), (PlanByMeasuring, "__init__"), (PlanByMeasuring, "settle")],
    "metrics": [(StepMeter, "add"), (StepMeter, "record"), (MetricsLogger, "log")],
    "slot reports": [(DeviceWorker, "_report")],
    "buffers": [(BufferReservation, "reserve_for"), (ActivationTransfers, "prepare")],
    "tracing, off": [(StepTraces, "before_dispatch"), (StepTraces, "add")],
    "position in the data": [(Loader, "state_dict")],
}


class Costs:
    """Processor time by kind, of all threads; what a watched function calls counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.marks = 0
        self.mark_s = seconds_per_mark()
        self.halves: list[dict[str, float]] = []
        self._lock = threading.Lock()
        self._inside = threading.local()

    def watched(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is added up."""

        def call(*arguments: Any, **options: Any) -> Any:
            if getattr(self._inside, "any", False):
                return function(*arguments, **options)
            self._inside.any, start_s = True, time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self._inside.any = False
                with self._lock:
                    self.seconds[kind] += time.thread_time() - start_s

        return call

    def end_half(self) -> None:
        """What was added since the last call is a half of the run."""
        with self._lock:
            self.halves.append({**self.seconds, "marks": self.marks * self.mark_s})
            self.seconds.clear()
            self.marks = 0

    def counted_mark(self, mark: Callable[..., Any]) -> Callable[..., Any]:
        """`Device.mark`, which is too short to be timed by itself."""

        def call(device: CpuDevice, stream: Stream) -> Any:
            with self._lock:
                self.marks += 1
            return mark(device, stream)

        return call


@contextmanager
def watching(costs: Costs) -> Iterator[None]:
    """Within the block, everything in `WATCHED` is timed."""
    with ExitStack() as stack:
        for kind, functions in WATCHED.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, costs.watched(kind, getattr(owner, name))))
        stack.enter_context(patch.object(CpuDevice, "mark", costs.counted_mark(CpuDevice.mark)))
        yield


def seconds_per_mark() -> float:
    """Processor time of a mark and its share of a piece, which has two."""
    device = CpuDevice(0)
    start_s = time.thread_time()
    for _ in range(MARK_TURNS):
        DeviceSpan(TaskKind.FORWARD, 0, device.mark(Stream.COMPUTE), device.mark(Stream.COMPUTE))
    return (time.thread_time() - start_s) / (2 * MARK_TURNS)


def measure(overrides: Sequence[str], steps: int, amortise: int) -> dict[str, Any]:
    """Seconds of each kind per step, and their share of the median step."""
    costs = Costs()
    logged: list[StepRecord] = []
    log = MetricsLogger.log

    def log_and_count(metrics: MetricsLogger, record: StepRecord) -> None:
        log(metrics, record)
        logged.append(record)
        if len(logged) == steps // 2:
            costs.end_half()

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(MetricsLogger, "log", log_and_count),
        watching(costs),
    ):
        code = train.main(
            [
                *("--config", str(CONFIG), f"--run.folder={folder}", "--run.name=run"),
                *(
                    f"--training.steps={steps}",
                    "--lr_schedule.warmup_steps=1",
                    "--checkpoint.interval_steps=0",
                ),
                *overrides,
            ]
        )
        if code != 0:
            raise SystemExit(f"the run ended with exit code {code}")
    costs.end_half()
    first, second = costs.halves
    step_s = statistics.median(record.step_s for record in logged[steps // 2 :])
    per_step = {kind: seconds / (steps - steps // 2) for kind, seconds in second.items()}
    once = {kind: max(seconds - steps // 2 * per_step.get(kind, 0.0), 0.0) for kind, seconds in first.items()}
    per_step["once, shared out"] = sum(once.values()) / amortise
    return {
        "step_s": step_s,
        "seconds_once": once,
        "seconds_per_step": per_step,
        "percent_of_step": {kind: 100 * seconds / step_s for kind, seconds in per_step.items()},
        "percent_together": 100 * sum(per_step.values()) / step_s,
    }


def main() -> None:
    """Run, and print what it cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="steps of the run")
    parser.add_argument("--amortise", type=int, default=1000, help="steps that planning is shared out over")
    options, overrides = parser.parse_known_args()
    print(json.dumps(measure(overrides, options.steps, options.amortise), indent=2))


if __name__ == "__main__":
    main()

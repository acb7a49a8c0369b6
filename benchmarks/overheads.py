"""What planning, reports and metrics cost of a step: processor time of each, in a real run of the training command."""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest.mock import patch

from benchmarks.frame import ROOT, Benchmark, Report
from torchround.commands import train_model
from torchround.data.loader import Loader
from torchround.engine.buffer_reservation import BufferReservation
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.reports import DeviceSpan
from torchround.engine.timeline import TaskKind
from torchround.engine.tracing import StepTraces
from torchround.engine.worker.device_worker import DeviceWorker
from torchround.engine.worker.transfers import ActivationTransfers
from torchround.observe import MetricsLogger, StepRecord
from torchround.run.run_plan import PlanByMeasuring
from torchround.run.step_meter import StepMeter

CONFIG = ROOT / "configs" / "debug.toml"
MOST_PERCENT = 0.5
MARK_TURNS = 20000
# Kind of cost: the functions whose time belongs to it, by owner and name.
WATCHED: dict[str, list[tuple[Any, str]]] = {
    "planning": [
        (train_model, "plan_with_advice"),
        (PlanByMeasuring, "__init__"),
        (PlanByMeasuring, "settle"),
    ],
    "metrics": [(StepMeter, "add"), (StepMeter, "record"), (MetricsLogger, "log")],
    "slot reports": [(DeviceWorker, "_report")],
    "buffers": [(BufferReservation, "reserve_for"), (ActivationTransfers, "prepare")],
    "tracing, off": [(StepTraces, "before_dispatch"), (StepTraces, "add")],
    "position in the data": [(Loader, "state_dict")],
}


class ProcessorTimes:
    """Processor time by kind, added up over all threads. A watched function inside another one counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.marks = 0
        self.mark_s = seconds_per_mark()
        self.halves: list[dict[str, float]] = []
        self._lock = threading.Lock()
        self._inside = threading.local()

    def watched(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` so that its time is added up."""

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
        """Close a half of the run: keep what was added since the last call, and start again at zero."""
        with self._lock:
            self.halves.append({**self.seconds, "marks": self.marks * self.mark_s})
            self.seconds.clear()
            self.marks = 0

    def counted_mark(self, mark: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Device.mark` so that its calls are counted: one call is too short to be timed."""

        def call(device: CpuDevice, stream: Stream) -> Any:
            with self._lock:
                self.marks += 1
            return mark(device, stream)

        return call


@contextmanager
def watching(costs: ProcessorTimes) -> Iterator[None]:
    """Time everything in `WATCHED` within the block."""
    with ExitStack() as stack:
        for kind, functions in WATCHED.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, costs.watched(kind, getattr(owner, name))))
        stack.enter_context(patch.object(CpuDevice, "mark", costs.counted_mark(CpuDevice.mark)))
        yield


def seconds_per_mark() -> float:
    """Measure the processor time of a mark and half of a span, which has two marks."""
    device = CpuDevice(0)
    start_s = time.thread_time()
    for _ in range(MARK_TURNS):
        DeviceSpan(TaskKind.FORWARD, device.mark(Stream.COMPUTE), device.mark(Stream.COMPUTE))
    return (time.thread_time() - start_s) / (2 * MARK_TURNS)


def measure_run(overrides: Sequence[str], steps: int, amortise: int) -> Report:
    """Train `steps` steps; return seconds of each kind per step, and their share of the median step."""
    costs = ProcessorTimes()
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
        arguments = ["--config", str(CONFIG), f"--run.folder={folder}", "--run.name=run"]
        arguments += [f"--training.steps={steps}", "--checkpoint.interval_steps=0"]
        # The report of the command goes to stdout, which belongs to this benchmark's figures.
        with redirect_stdout(sys.stderr):
            code = train_model.main([*arguments, "--lr_schedule.warmup_steps=1", *overrides])
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the length of the run."""
    parser.add_argument("--steps", type=int, default=24, help="steps of the run")
    parser.add_argument("--amortise", type=int, default=1000, help="steps that planning is shared out over")


OVERHEADS = Benchmark(
    """What planning, slot reports, metrics and buffers cost of a step: processor time of each in a real run.

Further options are overrides of configs/debug.toml, such as --model.flavor=debug_25m. The run logs every step. Waiting
costs nothing here: the benchmark counts the processor time of all threads in these functions, although most of it runs
beside the devices. A step's cost is the mean over the second half of the run. What the first half takes beyond that
(planning, allocating, first calls) comes once a run and is shared out over --amortise steps. --check asks for at most
0.5 % of a step.""",
    add_options,
    lambda options: measure_run(options.overrides, options.steps, options.amortise),
    lambda figures: (
        f"{1e3 * sum(figures['seconds_per_step'].values()):.1f} ms of processor time per step, "
        + f"{figures['percent_together']:.2f} % of a step of {figures['step_s']:.1f} s",
        f"bound: {MOST_PERCENT} %",
    ),
    "--steps 4 --training.seq_len=32 --training.global_batch_size=2 --training.micro_batch_size=1",
    lambda figures: (
        [f"together {figures['percent_together']:.2f} % of a step"]
        if figures["percent_together"] > MOST_PERCENT
        else []
    ),
    takes_overrides=True,
)

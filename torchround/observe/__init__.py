"""What a run tells about itself: a file, the console, Weights & Biases. No training step fails by it."""

from torchround.observe.logger import MetricsLogger, open_metrics
from torchround.observe.record import EngineRecord, StepRecord, host_gib, host_peak_gib
from torchround.observe.reporters import MetricsFile
from torchround.run.step_meter import Interval, Throughput, mfu, train_flops_per_token

__all__ = [
    "EngineRecord",
    "Interval",
    "MetricsFile",
    "MetricsLogger",
    "StepRecord",
    "Throughput",
    "host_gib",
    "host_peak_gib",
    "mfu",
    "open_metrics",
    "train_flops_per_token",
]

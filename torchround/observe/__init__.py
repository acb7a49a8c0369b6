"""What a run tells about itself: a file, the console, Weights & Biases. No training step fails by it."""

from torchround.observe.engine_record import EngineRecord
from torchround.observe.logger import MetricsLogger, open_metrics
from torchround.observe.memory import host_gib, host_peak_gib
from torchround.observe.metrics import MetricsFile
from torchround.observe.record import StepRecord
from torchround.observe.throughput import Interval, Throughput, mfu, train_flops_per_token

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

"""Everything that a run reports: a file, the console, Weights & Biases. A report that fails never fails a step."""

from torchround.observe.logger import MetricsLogger, open_metrics, users_writer
from torchround.observe.metrics_file import MetricsFile
from torchround.observe.record import StepRecord, host_gib, host_peak_gib

__all__ = [
    "MetricsFile",
    "MetricsLogger",
    "StepRecord",
    "host_gib",
    "host_peak_gib",
    "open_metrics",
    "users_writer",
]

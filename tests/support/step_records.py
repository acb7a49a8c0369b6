"""A step's record, for tests of reports and the programs that they start."""

from dataclasses import replace

from torchround.observe.metrics_file import MetricsFile
from torchround.observe.record import StepRecord

RECORD = StepRecord(
    step=1,
    loss=3.25,
    grad_norm=0.875,
    lr=3e-4,
    tokens=4096,
    tokens_per_s=12345.6,
    mfu=None,
    step_s=0.5,
    data_s=0.01,
    optimizer_s=0.02,
    bubble=0.1,
    host_gib=1.5,
    skipped_steps=0,
)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


# What the devices did, for a record with such figures.
ENGINE = {"busy_s": (0.25, 0.5), "input_wait_s": (0.1, 0.0), "weights_wait_s": (0.0, 0.0)}
ENGINE |= {"optimizer_wait_s": (0.02, 0.0), "uploaded_gib": (1.5, 1.5), "downloaded_gib": (1.0, 1.0)}
ENGINE |= {"device_peaks_gib": (2.0, 2.0), "host_peak_gib": 8.0, "host_pool_gib": 0.5}
ENGINE |= {"device_allocations": 0, "host_allocations": 0}


def record(step, **changes):
    return replace(RECORD, step=step, **changes)


def write_run(folder, steps, validated=(), **changes):
    """Write the metrics of a run whose loss at step n is 10 / n, and its validation loss a tenth more. Returns `folder`."""
    metrics = MetricsFile(folder / "metrics.jsonl", after_step=steps.start - 1)
    for step in steps:
        validation = {"validation_loss": 11.0 / step} if step in validated else {}
        metrics.log(record(step, **{"loss": 10.0 / step, **validation, **changes}))
    metrics.close()
    return folder

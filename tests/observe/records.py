"""A record to report, for the tests of this folder and the programs they start."""

from dataclasses import replace

from torchround.observe import StepRecord

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
    device_peak_gib=None,
    host_gib=1.5,
    skipped_steps=0,
)


def record(step: int, **changes: float | None) -> StepRecord:
    """The record of `step`, with `changes`."""
    return replace(RECORD, step=step, **changes)  # type: ignore[arg-type]

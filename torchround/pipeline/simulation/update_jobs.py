"""Work that devices do for an update, once gradients are complete: the orthogonalisation of Muon, one job for each layer.

Jobs follow the stage slots of a step. They are dealt to the devices in turn, the deepest layer first, as gradients land; the
device of the next slot gets the first one. Afterwards slots continue as without them. In `async` the jobs of
a step come among the slots of the next one (`partition.slots_before_late_jobs`). A job begins once its layer's gradient is
complete: the host's look-ahead goes up, the device computes, and the direction comes down. The copies of one job run
beside the computation of others. The update begins when all directions are back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchround.pipeline.costs import Costs


@dataclass(frozen=True)
class UpdateJob:
    """One layer's job: the device's seconds, and the seconds of a copy in each direction."""

    layer: int
    seconds: float
    link_s: float


def update_jobs(costs: Costs) -> tuple[UpdateJob, ...]:
    """List the jobs of one step in the order in which devices take them."""
    return tuple(
        UpdateJob(index, layer.job_s, layer.job_link_s)
        for index, layer in reversed(list(enumerate(costs.layers)))
        if layer.job_s or layer.job_link_s
    )


def run_jobs(
    jobs: Sequence[UpdateJob], complete_s: Sequence[float], free: list[float], first: int = 0
) -> float:
    """Run the jobs of one step; return when the last direction is back on the host, or 0 if there are no jobs.

    The device at index `first` of `free` takes the first job. `complete_s` says for each job when its layer's gradient is complete. `free[k]` is when the device of the k-th next
    slot becomes free; it is updated in place.
    """
    num_devices, back_s = len(free), 0.0
    # Between steps both directions of the link have time enough, so each device's link is free at its first job.
    up_s, down_s = [0.0] * num_devices, [0.0] * num_devices
    for index, (job, ready_s) in enumerate(zip(jobs, complete_s, strict=True)):
        device = (first + index) % num_devices
        up_s[device] = max(up_s[device], ready_s) + job.link_s
        free[device] = max(free[device], up_s[device]) + job.seconds
        down_s[device] = max(down_s[device], free[device]) + job.link_s
        back_s = max(back_s, down_s[device])
    return back_s

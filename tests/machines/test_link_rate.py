"""The measured rate of the network: one number for all machines, and no more than the slowest card carries."""

from functools import partial

from tests.support.machines import run_machines
from torchround.machines.link_rate import measure_rate


def test_all_machines_learn_the_rate_of_the_slowest_one():
    measure = partial(measure_rate, trial_bytes=1 << 16, seconds=0.01)
    rates = run_machines(3, measure, connections=2, bytes_per_s=lambda rank: 4e6 if rank == 1 else None)
    # A limit sleeps at least as long as the bytes take, so a measurement can only be lower.
    assert len(set(rates)) == 1 and 0 < rates[0] <= 4e6

"""The measured rate of the network: one number for all machines, and no more than the slowest card carries."""

import pytest

from tests.support.machines import run_machines
from torchround.machines import link_rate
from torchround.machines.link_rate import measure_rate
from torchround.machines.links import RateLimit


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch):
    monkeypatch.setattr(link_rate, "TRIAL_BYTES", 1 << 16)
    monkeypatch.setattr(link_rate, "MEASURED_S", 0.01)


@pytest.mark.parametrize("num_machines", [2, 3])
def test_all_machines_learn_the_same_rate(num_machines):
    rates = run_machines(num_machines, measure_rate, connections=2)
    assert rates[0] > 0
    assert len(set(rates)) == 1


def test_the_rate_is_that_of_the_slowest_machine():
    slow_bytes_per_s = 4e6

    def slow_down_one(group):
        if group.rank == 1:
            group.links._outgoing = RateLimit(slow_bytes_per_s)
        return measure_rate(group)

    rates = run_machines(3, slow_down_one, connections=2)
    # A limit sleeps at least as long as the bytes take, so a measurement can only be lower.
    assert len(set(rates)) == 1 and rates[0] <= slow_bytes_per_s

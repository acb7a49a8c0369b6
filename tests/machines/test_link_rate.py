"""The measured rate of the network: one number for all machines, and no more than the slowest card carries."""

from tests.support.machines import run_machines
from torchround.machines import link_rate
from torchround.machines.link_rate import measure_rate


def test_all_machines_learn_the_rate_of_the_slowest_one(monkeypatch):
    monkeypatch.setattr(link_rate, "TRIAL_BYTES", 1 << 16)
    monkeypatch.setattr(link_rate, "MEASURED_S", 0.01)
    rates = run_machines(3, measure_rate, connections=2, bytes_per_s=lambda rank: 4e6 if rank == 1 else None)
    # A limit sleeps at least as long as the bytes take, so a measurement can only be lower.
    assert len(set(rates)) == 1 and 0 < rates[0] <= 4e6

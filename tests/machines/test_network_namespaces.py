"""Two machines in network namespaces of their own, over a link of a limited rate that is cut."""

import os

import pytest
import torch

from tests.support.machines import start_machines
from tests.support.namespaces import ADDRESSES, enter, networks_of
from torchround.config import Config
from torchround.machines.errors import MachineError
from torchround.machines.launch import join
from torchround.machines.link_rate import measure_rate
from torchround.machines.links import Purpose

MBIT_PER_S = 200
TIMEOUT_S = 3.0


def exchange_for_ever(networks):
    """Join, print the link's rate, then send tensors to the other machine until an error ends it."""
    rank = int(os.environ["RANK"])
    enter(networks[rank])
    os.environ["MASTER_ADDR"] = ADDRESSES[0]
    config = Config.model_validate(
        {
            "model": {"family": "llama3"},
            "data": {"sources": [{"path": "python-stdlib"}]},
            "machines": {"timeout_s": TIMEOUT_S, "share_host": True},
        }
    )
    group = join(os.environ, config, host=f"node{rank}")
    assert group is not None, "there are two machines"
    print(f"rate {measure_rate(group):.0f}", flush=True)
    sender = group.links.sender(1 - rank, Purpose.GRADIENTS)
    receiver = group.links.receiver(1 - rank, Purpose.GRADIENTS)
    values = torch.arange(100_000, dtype=torch.int32)
    try:
        for step in range(10**9):
            # One sends while the other receives, then the other way round.
            for is_sender in (rank == 0, rank == 1):
                if is_sender:
                    sender.send(values + step, f"part {step}")
                else:
                    found = torch.empty_like(values)
                    receiver.receive(found, f"part {step}")
                    assert torch.equal(found, values + step), f"part {step} arrived wrong"
            if step == 3:
                print("at work", flush=True)
    except MachineError as error:
        print(f"[{error}]", flush=True)
        return 1
    finally:
        group.close()
    return 0


@pytest.mark.nightly
def test_a_partition_of_the_network_ends_both_machines_with_the_name_of_the_other(processes, tmp_path):
    with networks_of(MBIT_PER_S) as networks:
        function = "tests.machines.test_network_namespaces:exchange_for_ever"
        machines = start_machines(processes, 2, function, networks.names, first_holds_store=True, folder=tmp_path)
        for machine in machines:
            machine.wait_until_printed("at work")
        networks.cut()
        codes = [machine.wait() for machine in machines]
    assert codes == [1, 1], [machine.text() for machine in machines]
    first, second = (machine.text() for machine in machines)
    assert f"[machine 1 (node1) has given no sign of life for {TIMEOUT_S:g} s" in first
    assert "[machine 0 (node0) cannot be reached, and keeps the store" in second
    assert "machine 0 (node0) waited for" in first and "machine 1 (node1) waited for" in second
    # Both machines know one rate, which the link limits.
    rates = {float(line.removeprefix("rate ")) for line in (first + second).splitlines() if line.startswith("rate ")}
    assert len(rates) == 1 and rates.pop() * 8 < 1.1 * MBIT_PER_S * 1e6

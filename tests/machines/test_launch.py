"""The start of a run on several machines: who may be one run, and the one message if they may not."""

import threading

import pytest
from torch.distributed import TCPStore

from tests.support.machines import LOOPBACK, named
from torchround.config import Config
from torchround.machines import launch
from torchround.machines.group import HostShare, LaunchError
from torchround.machines.launch import differences, join

TABLES = {"model": {"family": "llama3", "flavor": "debug"}, "data": {"sources": [{"path": "python-stdlib"}]}}


def config_with(**tables):
    names = {**TABLES, **tables}
    return Config.model_validate({name: {**TABLES.get(name, {}), **tables.get(name, {})} for name in names})


OTHER = {"training": {"seq_len": 64}, "optimizer": {"lr": 0.5}}


class Launch:
    """Machines that join as threads, over one store as torchrun's agent keeps it."""

    def __init__(self):
        self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def join(self, configs, size=None, host_of=lambda rank: f"node{rank}", start_timeout_s=30.0):
        outcomes = {}

        def run(rank):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size or len(configs)), "MASTER_ADDR": LOOPBACK}
            environment |= {"MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            try:
                group = join(environment, configs[rank], start_timeout_s, f"node{rank}", host_of(rank))
            except LaunchError as error:
                outcomes[rank] = str(error)
                return
            outcomes[rank] = group.rank, group.size, group.machines[group.rank].share
            group.close()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(configs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [outcomes[rank] for rank in range(len(configs))]


def test_one_process_is_no_group():
    assert join({}, config_with()) is None
    assert join({"RANK": "0", "WORLD_SIZE": "1"}, config_with()) is None


def test_keys_that_say_how_a_machine_does_its_part_may_differ():
    other = config_with(
        run={"folder": "elsewhere"},
        data={"sources": [{"path": "their/copy.txt"}], "num_workers": 2},
        engine={"num_devices": 3, "device_memory_gib": 1.0, "plan": "plan.json"},
    )
    base = config_with(data={"sources": [{"path": "our/copy.txt"}]})
    assert Launch().join([base, other]) == [(rank, 2, HostShare(0, 1)) for rank in range(2)]
    assert all(set(keys) <= base.model_dump()[table].keys() for table, keys in launch.OWN_KEYS.items())


def test_a_different_config_is_one_message_on_all_with_the_keys_values_and_machines():
    base, other = config_with(), config_with(**OTHER)
    text = (
        "the machines of this run must agree, but differ in\n"
        "  training.seq_len: 2048 on machine 0 (node0), machine 2 (node2); 64 on machine 1 (node1)\n"
        "  optimizer.lr: 0.0003 on machine 0 (node0), machine 2 (node2); 0.5 on machine 1 (node1)"
    )
    assert Launch().join([base, other, base]) == [text] * 3


def test_long_values_that_differ_in_their_end_alone_differ():
    many = [{"path": "a", "field": f"field_{index}"} for index in range(20)]
    changed = [*many[:-1], {"path": "a", "field": "another"}]
    first, second = Launch().join([config_with(data={"sources": some}) for some in (many, changed)])
    assert first == second and "data.sources" in first


def test_other_versions_are_named(monkeypatch):
    versions = iter(["0.1", "0.2"])
    monkeypatch.setattr(launch, "version", lambda package: next(versions))
    first, second = Launch().join([config_with()] * 2)
    assert first == second and "version of torchround: 0." in first


def test_several_processes_on_one_host_are_refused_unless_they_may_share_it():
    host_of = lambda rank: "host" if rank else "another"
    [text] = set(Launch().join([config_with()] * 3, host_of=host_of))
    assert "machine 1 (node1) and machine 2 (node2)." in text and "--nproc-per-node 1" in text
    outcomes = Launch().join([config_with(machines={"share_host": True})] * 3, host_of=host_of)
    assert [share for _, _, share in outcomes] == [HostShare(0, 1), HostShare(0, 2), HostShare(1, 2)]


def test_a_later_attempt_in_the_same_store_takes_nothing_from_the_one_before():
    launch_twice = Launch()
    assert "seq_len" in launch_twice.join([config_with(), config_with(**OTHER), config_with()])[0]
    # One machine less, as `torchrun --nnodes 2:3` restarts after a loss.
    assert [outcome[:2] for outcome in launch_twice.join([config_with()] * 2)] == [(0, 2), (1, 2)]
    assert [outcome[:2] for outcome in launch_twice.join([config_with()] * 3)] == [(0, 3), (1, 3), (2, 3)]


def test_machines_that_do_not_come_are_counted_and_named():
    text = "2 of 3 machines came within 4 s; missing: 2. See their logs for why"
    assert Launch().join([config_with()] * 2, size=3, start_timeout_s=4.0) == [text] * 2


def test_a_store_that_cannot_be_reached_or_is_not_given_is_named():
    port = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False).port
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    with pytest.raises(LaunchError, match=rf"store at {LOOPBACK}:{port} within 0.2 s"):
        join(environment, config_with(), start_timeout_s=0.2)
    with pytest.raises(LaunchError, match="no MASTER_ADDR .*torchrun"):
        join({"RANK": "1", "WORLD_SIZE": "2"}, config_with())


def test_values_that_differ_or_are_missing_are_named_with_their_machines():
    assert differences(named(2), [{"data": "a", "checkpoint": None}] * 2) == ""
    assert differences(named(2), [{"data": "a", "checkpoint": None}, {"data": "b"}]) == (
        "the machines of this run must agree, but differ in\n"
        "  data: a on machine 0 (node0); b on machine 1 (node1)\n"
        "  checkpoint: null on machine 0 (node0); not given on machine 1 (node1)"
    )

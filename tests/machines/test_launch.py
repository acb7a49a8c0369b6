"""The start of a run on several machines: who may be one run, and the one message if they may not."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.machines import LOOPBACK, run_machines
from torchround.config import Config
from torchround.machines import launch
from torchround.machines.errors import LaunchError
from torchround.machines.group import HostShare, MachineGroup
from torchround.machines.launch import join, require_same

TABLES: dict[str, Any] = {
    "model": {"family": "llama3", "flavor": "debug"},
    "data": {"sources": [{"path": "python-stdlib"}]},
}


def config_with(**tables: dict[str, Any]) -> Config:
    """Make a config from `TABLES` with further keys of tables."""
    return Config.model_validate(
        {name: {**TABLES.get(name, {}), **tables.get(name, {})} for name in {**TABLES, **tables}}
    )


class Launch:
    """Machines that join as threads, over one store as torchrun's agent keeps it."""

    def __init__(self) -> None:
        self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def environment(self, rank: int, size: int) -> dict[str, str]:
        """Return what torchrun would set."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def join(
        self,
        configs: list[Config],
        size: int | None = None,
        host_of: Callable[[int], str] = lambda rank: f"node{rank}",
        start_timeout_s: float = 30.0,
    ) -> list[Any]:
        """Let a machine join for each config; return what each got: `rank, size, host share`, or its message."""
        outcomes: dict[int, Any] = {}

        def run(rank: int) -> None:
            environment = self.environment(rank, size or len(configs))
            try:
                group = join(environment, configs[rank], start_timeout_s, f"node{rank}", host_of(rank))
            except LaunchError as error:
                outcomes[rank] = str(error)
                return
            assert group is not None, "several machines are a group"
            outcomes[rank] = group.rank, group.size, group.host_share
            group.close()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(configs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [outcomes[rank] for rank in range(len(configs))]


def test_one_process_is_no_group() -> None:
    assert join({}, config_with()) is None
    assert join({"RANK": "0", "WORLD_SIZE": "1"}, config_with()) is None


def test_machines_of_one_config_become_a_group() -> None:
    assert Launch().join([config_with()] * 3) == [(rank, 3, HostShare(0, 1)) for rank in range(3)]


def test_keys_that_say_how_a_machine_does_its_part_may_differ() -> None:
    other = config_with(
        run={"folder": "elsewhere"},
        model={"flavor": "debug"},
        data={"sources": [{"path": "their/copy.txt"}], "num_workers": 2},
        engine={"num_devices": 3, "device_memory_gib": 1.0, "plan": "plan.json"},
    )
    base = config_with(data={"sources": [{"path": "our/copy.txt"}]})
    assert [outcome[:2] for outcome in Launch().join([base, other])] == [(0, 2), (1, 2)]


def test_a_different_config_is_one_message_on_all_with_the_keys_values_and_machines() -> None:
    base, other = config_with(), config_with(training={"seq_len": 64}, optimizer={"lr": 0.5})
    text = (
        "the machines of this run must agree, but differ in\n"
        "  training.seq_len: 2048 on machine 0 (node0), machine 2 (node2); 64 on machine 1 (node1)\n"
        "  optimizer.lr: 0.0003 on machine 0 (node0), machine 2 (node2); 0.5 on machine 1 (node1)"
    )
    assert Launch().join([base, other, base]) == [text] * 3


def test_long_values_that_differ_in_their_end_alone_differ() -> None:
    many = [{"path": "a", "field": f"field_{index}"} for index in range(20)]
    changed = [*many[:-1], {"path": "a", "field": "another"}]
    first, second = Launch().join([config_with(data={"sources": some}) for some in (many, changed)])
    assert first == second and "data.sources" in first


def test_many_differences_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_DIFFERENCES", 1)
    other = config_with(training={"seq_len": 64, "steps": 3}, optimizer={"lr": 0.5})
    first, second = Launch().join([config_with(), other])
    assert first == second and first.endswith("\n  and 2 more")


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter([{"version of torch": "2.12.0"}, {"version of torch": "2.13.0"}])
    monkeypatch.setattr(launch, "_versions", lambda: next(versions))
    first, second = Launch().join([config_with()] * 2)
    assert first == second and "version of torch: 2.1" in first


def test_several_processes_on_one_host_are_refused() -> None:
    outcomes = Launch().join([config_with()] * 3, host_of=lambda rank: "host" if rank else "another")
    assert len(set(outcomes)) == 1
    assert "machine 1 (node1) and machine 2 (node2). One process drives all devices" in outcomes[0]
    assert "--nproc-per-node 1" in outcomes[0]


def test_processes_that_may_share_a_host_are_told_their_part_of_it() -> None:
    config = config_with(machines={"share_host": True})
    outcomes = Launch().join([config] * 3, host_of=lambda rank: "host" if rank else "another")
    assert [share for _, _, share in outcomes] == [HostShare(0, 1), HostShare(0, 2), HostShare(1, 2)]


def test_machines_that_do_not_come_are_counted_and_named_on_the_ones_that_did() -> None:
    outcomes = Launch().join([config_with()] * 2, size=4, start_timeout_s=1.0)
    text = (
        "2 of 4 machines came within 1 s: machine 0 (node0), machine 1 (node1); missing: 2, 3. See their logs for why"
    )
    assert outcomes == [text] * 2


def test_a_later_attempt_in_the_same_store_takes_nothing_from_the_one_before() -> None:
    launch_twice = Launch()
    different = [config_with(), config_with(training={"seq_len": 64}), config_with()]
    assert "seq_len" in launch_twice.join(different)[0]
    # One machine less, as `torchrun --nnodes 2:3` restarts after a loss.
    assert [outcome[:2] for outcome in launch_twice.join([config_with()] * 2)] == [(0, 2), (1, 2)]
    assert [outcome[:2] for outcome in launch_twice.join([config_with()] * 3)] == [(0, 3), (1, 3), (2, 3)]


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False).port
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
    with pytest.raises(LaunchError, match=rf"cannot reach the launch's store at {LOOPBACK}:{port} within 0.5 s"):
        join(environment, config_with(), start_timeout_s=0.5)


def test_several_machines_without_a_store_are_refused() -> None:
    with pytest.raises(LaunchError, match="no MASTER_ADDR and no MASTER_PORT: start every machine with torchrun"):
        join({"RANK": "1", "WORLD_SIZE": "2"}, config_with())


def outcomes_of_identities(identities: list[dict[str, Any]], mistakes: list[str | None]) -> list[str]:
    """Return each machine's message from `require_same`; empty if it raised none."""

    def compare(group: MachineGroup) -> str:
        try:
            require_same(group, identities[group.rank], mistakes[group.rank])
        except LaunchError as error:
            return str(error)
        return ""

    return run_machines(len(identities), compare)


def test_what_machines_have_opened_must_be_the_same() -> None:
    assert outcomes_of_identities([{"data": "a", "checkpoint": None}] * 2, [None, None]) == ["", ""]
    text = (
        "the machines of this run must agree, but differ in\n"
        "  data: a on machine 0 (node0); b on machine 1 (node1)\n"
        "  checkpoint: null on machine 0 (node0); not given on machine 1 (node1)"
    )
    assert outcomes_of_identities([{"data": "a", "checkpoint": None}, {"data": "b"}], [None, None]) == [text] * 2


def test_a_mistake_that_one_machine_finds_is_told_on_all() -> None:
    assert outcomes_of_identities([{}, {}], [None, "no file a.txt"]) == ["machine 1 (node1): no file a.txt"] * 2
    assert outcomes_of_identities([{}, {}], ["too large", "too large"]) == ["too large"] * 2


def test_one_machine_alone_compares_nothing() -> None:
    require_same(None, {"data": "a"}, None)


def test_the_keys_that_may_differ_exist() -> None:
    dumped = config_with().model_dump()
    assert {f"{table}.{key}" for table, keys in dumped.items() for key in keys} >= launch.OWN_KEYS

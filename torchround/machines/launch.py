"""The start of a run on several machines: they meet, compare what must agree, and connect.

`torchrun` names a store in the environment, which may still hold what an earlier attempt of the same job wrote there.
The processes of this attempt therefore find each other by random names first (`_Meeting`). Machine 0 leads: it compares
the launches of all and writes the outcome, so every machine ends with the same message if they differ.
"""

import hashlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchround.config import Config
from torchround.config.toml_writer import toml_value
from torchround.machines.errors import LaunchError
from torchround.machines.group import START_TIMEOUT_S, HostShare, Machine, MachineGroup

POLL_S = 0.05
# The leader waits so long until all have read why the run is refused, the others for a leader that is late itself.
GRACE_S = 20.0
MOST_DIFFERENCES = 5
# Keys that may differ between machines: folders, and what only says how a machine does its part. A table's whole name
# stands for all its keys.
OWN_KEYS = {
    *(
        "run.folder",
        "model.hf_path",
        "tokenizer.path",
        "tokenizer.chat_template",
        "checkpoint.load_path",
        "lora.path",
    ),
    *("engine.devices", "engine.num_devices", "engine.device_memory_gib", "engine.host_memory_gib"),
    *("engine.keep_activations", "engine.cpu_threads", "data.num_workers"),
    *("metrics.wandb", "metrics.wandb_project", "machines.planned", "machines.gbit_per_s"),
    *("machines.card", "machines.num_cards", "machines.host_memory_gib"),
}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def join(
    environment: Mapping[str, str],
    config: Config,
    start_timeout_s: float = START_TIMEOUT_S,
    host: str | None = None,
    host_id: str | None = None,
) -> MachineGroup | None:
    """Meet the other machines of the run; return None if the environment names no others.

    `environment` is the process's, as torchrun has set it. `host` and `host_id` stand for this host's name and for what
    tells it from other hosts of that name; they are read from the system unless given. Raises `LaunchError` with the
    same text on every machine if they cannot be one run: some are missing, several are on one host, or their
    configurations or versions differ. Nothing is allocated or written by then.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if "RANK" not in environment or size == 1:
        return None
    rank = int(environment["RANK"])
    store = _reach_store(environment, rank, start_timeout_s)
    host = host or socket.gethostname()
    facts = {
        "host": host,
        "host_id": host_id or _host_id(host),
        "share_host": config.machines.share_host,
        "compared": {**_versions(), **_compared_keys(config)},
    }
    all_facts, meeting = _Meeting(store, rank, size, start_timeout_s).hold(facts, _difference)
    ids = [there["host_id"] for there in all_facts]
    share = HostShare(ids[:rank].count(ids[rank]), ids.count(ids[rank]))
    return MachineGroup(
        PrefixStore(meeting, store),
        rank,
        size,
        host=host,
        timeout_s=config.machines.timeout_s,
        connections=config.machines.connections,
        start_timeout_s=start_timeout_s,
        host_share=share,
    )


def require_same(group: MachineGroup | None, identity: Mapping[str, Any], mistake: str | None = None) -> None:
    """Raise `LaunchError` on all machines, with one text, unless their identities agree and none found a mistake.

    Every machine calls this once it has built what it can without allocating. `identity` maps a name that a user
    understands ("data", "pretrained weights", "checkpoint to resume from") to a JSON value, such as a fingerprint.
    `mistake` is the message of what this machine has found wrong. Does nothing on one machine.
    """
    if group is None:
        return
    found = group.channel("start").gather([mistake, dict(identity)], "what it has opened")
    mistakes = {rank: text for rank, (text, _) in enumerate(found) if text is not None}
    if len(mistakes) == group.size and len(set(mistakes.values())) == 1:
        raise LaunchError(mistakes[0])
    if mistakes:
        raise LaunchError("\n".join(f"{group.machines[rank]}: {text}" for rank, text in mistakes.items()))
    if text := _differences(group.machines, [values for _, values in found]):
        raise LaunchError(text)


class _Meeting:
    """How the processes of one attempt find each other in a store that may hold the keys of earlier attempts.

    Each writes a random name and its facts under its rank. The leader, machine 0, writes the names that it sees under
    its own one; each machine that finds its name there answers under both names. Names are new in every attempt, so
    an answer proves that both sides live. Once all have answered, the leader writes the outcome.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._name = uuid.uuid4().hex

    def hold(
        self, facts: Mapping[str, Any], refuse: Callable[[Sequence[Mapping[str, Any]]], str]
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the facts of all machines, and a prefix of the store that no earlier attempt has used.

        `refuse` returns why machines of such facts are no run, or an empty text. Raises `LaunchError`.
        """
        self._store.set(f"hello/{self._rank}", json.dumps([self._name, dict(facts)]))
        try:
            text, all_facts, leader = self._lead(refuse) if self._rank == 0 else self._follow()
        except RuntimeError as error:
            raise LaunchError(f"the store of the launch is lost: {_first_line(error)}") from error
        if text:
            raise LaunchError(text)
        return all_facts, f"meeting/{leader}"

    def _lead(self, refuse: Callable[[Sequence[Mapping[str, Any]]], str]) -> tuple[str, list[Any], str]:
        end_s = time.monotonic() + self._timeout_s
        welcomed: list[Any] = []
        while True:
            hellos = [self._read(f"hello/{other}") for other in range(self._size)]
            if hellos != welcomed:
                self._store.set("welcome", json.dumps([hello and hello[0] for hello in hellos]))
                welcomed = hellos
            came = [
                0,
                *(
                    rank
                    for rank, hello in enumerate(hellos)
                    if rank and hello and self._has_answered(hello[0])
                ),
            ]
            if len(came) == self._size or time.monotonic() > end_s:
                break
            time.sleep(POLL_S)
        all_facts = [hellos[rank][1] for rank in came]
        text = self._missing(came, all_facts) if len(came) < self._size else refuse(all_facts)
        self._store.set(f"outcome/{self._name}", json.dumps([text, all_facts]))
        if text:
            # This process may be the one that holds the store: the others read their message first.
            keys = [f"read/{self._name}/{rank}" for rank in came[1:]]
            with suppress(RuntimeError):
                self._store.wait(keys, timedelta(seconds=GRACE_S))
        return text, all_facts, self._name

    def _follow(self) -> tuple[str, list[Any], str]:
        end_s = time.monotonic() + self._timeout_s + GRACE_S
        while time.monotonic() < end_s:
            welcome = self._read("welcome")
            if welcome is not None and len(welcome) == self._size and welcome[self._rank] == self._name:
                leader = welcome[0]
                self._store.set(f"answer/{leader}/{self._name}", "here")
                outcome = self._read(f"outcome/{leader}")
                if outcome is not None:
                    text, all_facts = outcome
                    self._store.set(f"read/{leader}/{self._rank}", "yes")
                    return text, all_facts, leader
            time.sleep(POLL_S)
        return f"machine 0 of {self._size} did not come within {self._timeout_s:g} s", [], ""

    def _has_answered(self, name: str) -> bool:
        return bool(self._store.check([f"answer/{self._name}/{name}"]))

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _missing(self, came: Sequence[int], their_facts: Sequence[Mapping[str, Any]]) -> str:
        present = ", ".join(
            str(Machine(rank, facts["host"])) for rank, facts in zip(came, their_facts, strict=True)
        )
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in came)
        return (
            f"{len(came)} of {self._size} machines came within {self._timeout_s:g} s: {present}; missing: {missing}. "
            "See their logs for why"
        )


def _reach_store(environment: Mapping[str, str], rank: int, timeout_s: float) -> Store:
    """Connect to the launch's store. Without torchrun's own one, machine 0 holds it in its process."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise LaunchError(
            f"the environment has RANK and WORLD_SIZE of several machines, but no {' and no '.join(missing)}: start "
            "every machine with torchrun, or unset RANK and WORLD_SIZE to train on this machine alone"
        )
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_master = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            host,
            port,
            None,
            is_master,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # A server may serve several jobs, and several attempts of each.
        return PrefixStore(f"torchround/{environment.get('TORCHELASTIC_RUN_ID', '')}", store)
    except RuntimeError as error:
        raise LaunchError(
            f"machine {rank} ({socket.gethostname()}) cannot reach the launch's store at {host}:{port} within "
            f"{timeout_s:g} s: {_first_line(error)}"
        ) from error


def _host_id(host: str) -> str:
    """Return what tells this host from others: its kernel's boot, since containers of one host have names of their own."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return host


def _versions() -> dict[str, str]:
    """Return what computes, for comparison. Builds of one torch for several kinds of accelerators may be mixed."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return {
        "version of torchround": f"{version('torchround')} (files {digest.hexdigest()[:8]})",
        "version of torch": torch.__version__.partition("+")[0],
    }


def _compared_keys(config: Config) -> dict[str, str]:
    """Map each key that must be the same on all machines to its value as TOML."""
    compared = {}
    for table, keys in config.model_dump(mode="json", exclude_none=True).items():
        for key, value in keys.items():
            name = f"{table}.{key}"
            if key == "sources":
                value = [
                    {inner: what for inner, what in source.items() if inner != "path"} for source in value
                ]
            is_file = name == "engine.plan" and isinstance(value, str)
            if name not in OWN_KEYS and not is_file:
                compared[name] = _shortened(toml_value(value))
    return compared


def _shortened(text: str) -> str:
    """Keep a value short in messages; equal texts stay equal, and different ones stay different."""
    return text if len(text) <= 80 else f"{text[:60]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _difference(all_facts: Sequence[Mapping[str, Any]]) -> str:
    """Return why these machines are no run, or an empty text."""
    machines = [Machine(rank, facts["host"]) for rank, facts in enumerate(all_facts)]
    hosts: dict[str, list[Machine]] = {}
    for machine, facts in zip(machines, all_facts, strict=True):
        hosts.setdefault(facts["host_id"], []).append(machine)
    crowded = [together for together in hosts.values() if len(together) > 1]
    if crowded and not all(facts["share_host"] for facts in all_facts):
        where = "; ".join(" and ".join(map(str, together)) for together in crowded)
        return (
            f"several processes run on one host: {where}. One process drives all devices of a host: start torchrun "
            "once on each host, with --nproc-per-node 1. (For tests, machines.share_host = true lets processes divide "
            "a host.)"
        )
    return _differences(machines, [facts["compared"] for facts in all_facts])


def _differences(machines: Sequence[Machine], all_values: Sequence[Mapping[str, Any]]) -> str:
    """Return what differs between machines, one line for each name; empty if nothing does."""
    names = list(dict.fromkeys(name for values in all_values for name in values))
    lines = []
    for name in names:
        holders: dict[str, list[Machine]] = {}
        for machine, values in zip(machines, all_values, strict=True):
            given = values.get(name, "not given")
            text = given if isinstance(given, str) else json.dumps(given)
            holders.setdefault(text, []).append(machine)
        if len(holders) > 1:
            given = "; ".join(f"{text} on {', '.join(map(str, there))}" for text, there in holders.items())
            lines.append(f"  {name}: {given}")
    if not lines:
        return ""
    if len(lines) > MOST_DIFFERENCES:
        lines[MOST_DIFFERENCES:] = [f"  and {len(lines) - MOST_DIFFERENCES} more"]
    return "\n".join(["the machines of this run must agree, but differ in", *lines])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

"""The start of a run on several machines: they meet, compare what must agree, and connect.

`torchrun` names a store in the environment, which may still hold what an earlier attempt of the same job wrote there, so the
machines meet under a random name first. Machine 0 compares all and writes the outcome.
"""

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchround.config import Config
from torchround.machines.group import START_TIMEOUT_S, HostShare, LaunchError, Machine, MachineGroup

POLL_S = 0.05
# The leader waits so long until all have read why the run is refused, the others for a leader that is late itself.
GRACE_S = 20.0
SHOWN_CHARACTERS = 80  # of a value that differs
# Keys that may differ between machines, by table: folders, and what only says how a machine does its part.
OWN_KEYS = {
    "run": ("folder",),
    "model": ("hf_path",),
    "tokenizer": ("path", "chat_template"),
    "checkpoint": ("load_path",),
    "lora": ("path",),
    "engine": (
        "devices",
        "num_devices",
        "device_memory_gib",
        "host_memory_gib",
        "keep_activations",
        "cpu_threads",
    ),
    "data": ("num_workers",),
    "metrics": ("wandb", "wandb_project"),
    "machines": ("planned", "gbit_per_s", "card", "num_cards", "host_memory_gib"),
}
Facts = dict[str, Any]  # what a machine tells the others of itself
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def join(
    environment: Mapping[str, str],
    config: Config,
    start_timeout_s: float = START_TIMEOUT_S,
    host: str | None = None,
    host_id: str | None = None,
) -> MachineGroup | None:
    """Meet the other machines of the run; return None if the `environment`, as torchrun has set it, names no others.

    `host` and `host_id` stand for this host's name and for what tells it from other hosts of that name. Raises `LaunchError`
    with the same text on every machine if some are missing, several are on one host, or configurations or versions differ.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if "RANK" not in environment or size == 1:
        return None
    rank = int(environment["RANK"])
    store = _reach_store(environment, rank, start_timeout_s)
    host = host or socket.gethostname()
    facts: Facts = {
        "name": uuid.uuid4().hex,
        "host": host,
        "address": _address_towards(environment["MASTER_ADDR"]),
        "host_id": host_id or _boot_id() or host,
        "share_host": config.machines.share_host,
        "compared": {**_versions(), **_compared_keys(config)},
    }
    try:
        if rank == 0:
            text, all_facts, meeting = _lead(store, size, start_timeout_s, facts)
        else:
            text, all_facts, meeting = _follow(store, rank, size, start_timeout_s, facts)
    except RuntimeError as error:
        raise LaunchError(f"the store of the launch is lost: {_first_line(error)}") from error
    if text:
        raise LaunchError(text)
    address = facts["address"]
    far = [there["address"] for there in all_facts if not there["address"].startswith("127.")]
    if far and address.startswith("127."):
        # This machine's name is that of its loopback, as in Debian's /etc/hosts: ask for the way to another one.
        address = _address_towards(far[0])
    ids = [there["host_id"] for there in all_facts]
    shares = [HostShare(ids[:other].count(ids[other]), ids.count(ids[other])) for other in range(size)]
    return MachineGroup(
        PrefixStore(meeting, store),
        rank,
        [Machine(other, all_facts[other]["host"], shares[other]) for other in range(size)],
        address=address,
        timeout_s=config.machines.timeout_s,
        start_timeout_s=start_timeout_s,
    )


# The meeting. Machine 0 writes a new name, and the others answer under that name with their facts. The outcome has the
# facts that were read, so each machine sees that it is among those, and does not take the outcome of an earlier attempt.


def _lead(store: Store, size: int, timeout_s: float, facts: Facts) -> tuple[str, list[Facts], str]:
    """Find why the machines are no run, or "", the facts of those that came, and a prefix of the store for them."""
    meeting = f"meeting/{facts['name']}"
    keys = [f"{meeting}/facts/{other}" for other in range(size)]
    store.set(keys[0], json.dumps(facts))
    store.set("meeting", meeting)
    with suppress(RuntimeError):  # not all came in time
        store.wait(keys, timedelta(seconds=timeout_s))
    came = [other for other in range(size) if store.check([keys[other]])]
    all_facts = [json.loads(store.get(keys[other])) for other in came]
    if len(came) == size:
        text = _difference(all_facts)
    else:
        missing = ", ".join(str(other) for other in range(size) if other not in came)
        text = f"{len(came)} of {size} machines came within {timeout_s:g} s; missing: {missing}. See their logs for why"
    store.set(f"{meeting}/outcome", json.dumps([text, all_facts]))
    if text:
        # This process may be the one that holds the store: the others read their message first.
        with suppress(RuntimeError):
            store.wait([f"{meeting}/read/{other}" for other in came[1:]], timedelta(seconds=GRACE_S))
    return text, all_facts, meeting


def _follow(
    store: Store, rank: int, size: int, timeout_s: float, facts: Facts
) -> tuple[str, list[Facts], str]:
    """Wait for what `_lead` returns on machine 0."""
    end_s = time.monotonic() + timeout_s + GRACE_S
    meeting = ""
    while time.monotonic() < end_s:
        newest = _read(store, "meeting")
        if newest != meeting:
            meeting = newest
            store.set(f"{meeting}/facts/{rank}", json.dumps(facts))
        text, all_facts = json.loads(_read(store, f"{meeting}/outcome") or '["", []]')
        if any(there["name"] == facts["name"] for there in all_facts):
            store.set(f"{meeting}/read/{rank}", "yes")
            return text, all_facts, meeting
        time.sleep(POLL_S)
    return f"machine 0 of {size} did not come within {timeout_s:g} s", [], ""


def _read(store: Store, key: str) -> str:
    return str(store.get(key), "utf-8") if store.check([key]) else ""


def _address_towards(host: str) -> str:
    """Find this machine's address on the way to `host`; nothing is sent."""
    for family, kind, protocol, _, there in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    return "127.0.0.1"


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
    options: dict[str, Any] = {"is_master": is_master, "wait_for_workers": False, "multi_tenant": True}
    try:
        store = TCPStore(host, port, timeout=timedelta(seconds=timeout_s), **options)
        # A server may serve several jobs, and several attempts of each.
        return PrefixStore(f"torchround/{environment.get('TORCHELASTIC_RUN_ID', '')}", store)
    except RuntimeError as error:
        raise LaunchError(
            f"machine {rank} ({socket.gethostname()}) cannot reach the launch's store at {host}:{port} within "
            f"{timeout_s:g} s: {_first_line(error)}"
        ) from error


def _boot_id() -> str:
    """Tell this host from others: by its kernel's boot, since containers of one host have names of their own."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def _versions() -> dict[str, str]:
    """Name what computes. Builds of one torch for several kinds of accelerators may be mixed."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return {
        "version of torchround": f"{version('torchround')} (files {digest.hexdigest()[:8]})",
        "version of torch": torch.__version__.partition("+")[0],
    }


def _compared_keys(config: Config) -> dict[str, str]:
    """Map each key that must be the same on all machines to its value as JSON."""
    compared = {}
    for table, keys in config.model_dump(mode="json", exclude_none=True).items():
        for key, value in keys.items():
            name = f"{table}.{key}"
            if key == "sources":
                value = [dict(source, path=None) for source in value]
            is_file = name == "engine.plan" and isinstance(value, str)
            if key not in OWN_KEYS.get(table, ()) and not is_file:
                compared[name] = json.dumps(value)
    return compared


def _difference(all_facts: Sequence[Mapping[str, Any]]) -> str:
    """Say why these machines are no run, or an empty text."""
    machines = [Machine(rank, facts["host"]) for rank, facts in enumerate(all_facts)]
    hosts: dict[str, list[str]] = {}
    for machine, facts in zip(machines, all_facts, strict=True):
        hosts.setdefault(facts["host_id"], []).append(str(machine))
    crowded = [" and ".join(together) for together in hosts.values() if len(together) > 1]
    if crowded and not all(facts["share_host"] for facts in all_facts):
        return (
            f"several processes run on one host: {'; '.join(crowded)}. One process drives all devices of a host: start torchrun "
            "once on each host, with --nproc-per-node 1. (In tests, machines.share_host = true lets them divide a host.)"
        )
    return differences(machines, [facts["compared"] for facts in all_facts])


def differences(machines: Sequence[Machine], all_values: Sequence[Mapping[str, Any]]) -> str:
    """Describe what differs between machines, one line for each name; empty if nothing does."""
    lines = []
    for name in dict.fromkeys(name for values in all_values for name in values):
        holders: dict[str, list[str]] = {}
        for machine, values in zip(machines, all_values, strict=True):
            given = values.get(name, "not given")
            text = given if isinstance(given, str) else json.dumps(given)
            holders.setdefault(text, []).append(str(machine))
        if len(holders) > 1:
            same = len(os.path.commonprefix([*holders]))
            start = max(0, same - SHOWN_CHARACTERS // 2)  # long values are shown where they begin to differ
            shown = (f"{text[start:][:SHOWN_CHARACTERS]} on {', '.join(on)}" for text, on in holders.items())
            lines.append(f"  {name}: {'; '.join(shown)}")
    return "\n".join(["the machines of this run must agree, but differ in", *lines]) if lines else ""


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

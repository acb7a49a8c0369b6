"""The machines of a run: who they are, what connects them, and one way for all of them to end when one is lost.

Every machine is one process of the run. Connections are gloo groups made here over a store, and belong to the
`MachineGroup`: there is no global process group, so that several machines can be threads of one test.

Gloo's own time-outs are a day. What ends a wait is `abort`: it lets one receive of a group time out, whereupon gloo
closes all connections of that group. Every thread that waits in it, here and on the other machines, then gets an error,
which `explain` turns into the fault that caused it.
"""

import ctypes
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchround.machines.channels import CHANNELS, Channel
from torchround.machines.errors import LaunchError, MachineError, MessageError
from torchround.machines.links import PeerLinks
from torchround.machines.liveness import Liveness, MachineFault

START_TIMEOUT_S = 300.0
"""Seconds that a machine waits for all others to come, once its own program has started."""

DAY = timedelta(days=1)
# No message has this tag. A receive with it can only time out.
ABORT_TAG = 2**31 - 1
# Another thread may be about to say what it waited for. A fault waits for that so long.
TELL_S = 0.5


@dataclass(frozen=True)
class Machine:
    """One process of the run, with all its devices. `host` is the name by which its owner knows it."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host})"


@dataclass(frozen=True)
class HostShare:
    """The part of a host that one process may use: process number `index` of `count`, which divide devices and memory."""

    index: int = 0
    count: int = 1


class MachineGroup:
    """All machines of a run, seen from one of them. `host_share` is the part of its host that this one may use."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        timeout_s: float = 60.0,
        connections: int = 4,
        address: str | None = None,
        bytes_per_s: float | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        host_share: HostShare | None = None,
    ) -> None:
        """Meet the other machines and connect to each. Every machine calls this, at any time within `start_timeout_s`.

        `store` is a `TCPStore` or a `PrefixStore` over one, of which this machine is client number `rank` of `size`.
        `host` names the machine in messages. `timeout_s` is the silence after which a machine is lost. `connections`
        is the number of gloo groups that carry tensors, and `bytes_per_s` limits what this machine sends through all of
        them. `address` is this machine's address or name in the network that the run uses; None takes the one from
        which the others can be reached. Raises `LaunchError` if not all machines come.
        """
        self.rank, self.size = rank, size
        self.host_share = host_share or HostShare()
        self.fault: MachineError | None = None
        store = PrefixStore("machines", store)
        self.machines, address = _meet(store, rank, size, host, address, start_timeout_s)
        self._lock = threading.Lock()
        self._has_failed = self._is_aborted = False
        self._call: Callable[[MachineError], None] | None = None
        self._waited_for = ""
        self._has_told = threading.Event()
        self._liveness = Liveness(store, rank, size, timeout_s, self._lose)
        names = [*CHANNELS, *(f"data/{index}" for index in range(connections))]
        self._groups = _connect(store, rank, size, address, names, start_timeout_s, self.machines)
        part_timeout = timedelta(seconds=timeout_s)
        self._channels = {
            name: Channel(self._groups[name], self.explain, part_timeout, lambda: self._is_aborted)
            for name in CHANNELS
        }
        data_groups = [group for name, group in self._groups.items() if name not in CHANNELS]
        self.links = PeerLinks(rank, size, data_groups, self.explain, bytes_per_s, part_timeout)
        self._liveness.start()

    def channel(self, name: str) -> Channel:
        """Return one of `CHANNELS`. One thread at a time may use it."""
        return self._channels[name]

    def on_fault(self, call: Callable[[MachineError], None]) -> None:
        """Call `call` once another machine failed or is lost; at once if that has happened. It replaces the one before.

        It is called on a thread of the group, or on this one, and never for a fault that this machine has told itself
        with `fail`.
        """
        with self._lock:
            fault = None if self._has_failed else self.fault
            self._call = call if fault is None else None  # each call is made once
        if fault is not None:
            call(fault)

    def explain(self, error: Exception, peer: int | None, waited_for: str) -> MachineError:
        """Return the named fault behind an error of gloo, and end the group if it is not ended yet.

        `peer` is the machine that this one waited for, None if that was all of them. `waited_for` says what it was to
        send. Looks for the cause for a few beats (`Liveness.cause`).
        """
        if isinstance(error, MachineError):
            return error
        if isinstance(error, MessageError):  # the connection stands: nothing of the peer is lost
            source = "" if peer is None else f", from {self.machines[peer]}"
            found = MachineFault(self.rank, f"has failed: {error}{source}")
            return self._set_fault(self._liveness.report(found), waited_for)
        with self._lock:
            self._waited_for = self._waited_for or waited_for
        self._has_told.set()
        return self._set_fault(self._liveness.cause(peer), waited_for)

    def fail(self, problem: str) -> None:
        """Tell the other machines that this one has failed, and wake every thread of all. The first fault wins."""
        with self._lock:
            self._has_failed = True
        found = self._liveness.report(MachineFault(self.rank, f"has failed: {problem}"))
        self._set_fault(found, "")
        self.abort()

    def abort(self) -> None:
        """Wake every thread that is blocked in a group, here and on the other machines. They raise MachineError."""
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
            # A thread of gloo that holds a part of a message is never woken, and the end of its group would wait for it.
            for group in self._groups.values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        others = [rank for rank in range(self.size) if rank != self.rank]
        for group in self._groups.values():
            # The first peer whose connection still stands makes the receive time out, which closes all of them.
            for peer in others:
                with suppress(RuntimeError):
                    group.recv([torch.zeros(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """End the group. Every machine calls this when it has nothing more to exchange; all wait for the last one."""
        if self.fault is None and not self._is_aborted:
            with suppress(MachineError):  # the run is complete here; the others report their own faults
                self.channel("start").gather(None, "the end of all machines")
        self._liveness.end()
        if self.fault is not None:
            self.abort()

    def _lose(self, found: MachineFault) -> None:
        """Take a fault from the watching thread: wake all others, then tell the run."""
        with self._lock:
            has_failed = self._has_failed
        self.abort()
        if has_failed:
            return
        self._has_told.wait(TELL_S)
        fault = self._set_fault(found, self._waited_for)
        with self._lock:
            call, self._call = self._call, None
        if call is not None:
            call(fault)

    def _set_fault(self, found: MachineFault, waited_for: str) -> MachineError:
        """Return the fault with what this thread waited for; the first one becomes the group's."""
        who = "a machine" if found.machine is None else str(self.machines[found.machine])
        text = f"{who} {found.problem}"
        if waited_for:
            text += f"; {self.machines[self.rank]} waited for {waited_for}"
        error = MachineError(text, found.machine, waited_for)
        with self._lock:
            if self.fault is None:
                self.fault = error
        return error


def _meet(
    store: Store, rank: int, size: int, host: str, address: str | None, timeout_s: float
) -> tuple[tuple[Machine, ...], str]:
    """Return all machines, and the address under which the others reach this one."""
    address = address or _own_address(store)
    keys = [f"host/{other}" for other in range(size)]
    store.set(keys[rank], json.dumps([host, address]))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        came = {other: json.loads(store.get(key))[0] for other, key in enumerate(keys) if store.check([key])}
        present = ", ".join(str(Machine(other, name)) for other, name in came.items())
        missing = ", ".join(str(other) for other in range(size) if other not in came)
        raise LaunchError(
            f"{len(came)} of {size} machines came within {timeout_s:g} s: {present}; missing: {missing}. Start all "
            "machines, and see whether each reaches the others"
        ) from error
    found = [json.loads(value) for value in store.multi_get(keys)]
    machines = tuple(Machine(other, name) for other, (name, _) in enumerate(found))
    far = [there for _, there in found if not there.startswith("127.")]
    if far and address.startswith("127."):
        # This machine's name is that of its loopback, as in Debian's /etc/hosts: ask for the way to another one.
        address = _address_towards(far[0]) or address
    return machines, address


def _own_address(store: Store) -> str:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return _address_towards(getattr(store, "host", "localhost")) or "127.0.0.1"


def _address_towards(host: str) -> str | None:
    """Return this machine's address on the way to `host`; nothing is sent."""
    for family, kind, protocol, _, there in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    return None


def _connect(
    store: Store,
    rank: int,
    size: int,
    address: str,
    names: list[str],
    timeout_s: float,
    machines: tuple[Machine, ...],
) -> dict[str, ProcessGroup]:
    """Connect this machine to all others, once for each name.

    Gloo takes the time-out for its operations, a day, as the one for connecting too. A thread of its own connects, so
    that a machine that ends meanwhile does not hold the others for a day.
    """
    gloo: Any = ProcessGroupGloo  # its types do not know its options
    groups: dict[str, ProcessGroup] = {}
    errors: list[Exception] = []

    def connect() -> None:
        try:
            for name in names:
                options = gloo._Options()
                options._timeout, options._threads = DAY, 1
                options._devices = [gloo.create_device(hostname=address)]
                groups[name] = gloo(PrefixStore(f"group/{name}", store), rank, size, options)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, name="machines-connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors or thread.is_alive():
        reason = str(errors[0]).splitlines()[0] if errors else f"no answer within {timeout_s:g} s"
        others = ", ".join(str(machine) for machine in machines if machine.rank != rank)
        raise LaunchError(
            f"{machines[rank]} at address {address} cannot connect to {others}: {reason}. Every machine must reach "
            "every other one on all ports"
        ) from (errors[0] if errors else None)
    return groups

"""The machines of a run: who they are, what connects them, and one way for all of them to end when one is lost.

Every machine is one process of the run. Connections are gloo groups made here over a store, and belong to the
`MachineGroup`: there is no global process group, so that several machines can be threads of one test.

Gloo's own time-outs are a day. What ends a wait is `abort`: it lets one receive of a group time out, whereupon gloo
closes all connections of that group. Every thread that waits in it, here and on the other machines, then gets an error,
which `explain` turns into the fault that caused it.
"""

import ctypes
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchround.machines.links import Link, MessageError, Purpose
from torchround.machines.liveness import Liveness, MachineFault

CHANNELS = ("start", "batches", "steps", "validation", "saves", "metrics")
"""Names of the channels, one for each thread that agrees with its like on the other machines."""

START_TIMEOUT_S = 300.0
"""Seconds that a machine waits for all others to come, once its own program has started."""

DAY = timedelta(days=1)
# A wait of a channel looks so often whether the group has ended. Gloo wakes no thread for a message of which a part has
# arrived, whatever happens to the connection.
LOOK_EVERY = timedelta(seconds=1)
# No message has this tag. A receive with it can only time out.
ABORT_TAG = 2**31 - 1
# Another thread may be about to say what it waited for. A fault waits for that so long.
TELL_S = 0.5

TRIAL_BYTES = 4 << 20  # to all peers together; takes 0.3 s on a network of 0.1 Gb/s, which is too slow anyway
MEASURED_S = 0.25
MOST_BYTES = 512 << 20


class MachineError(RuntimeError):
    """A fault of a run on several machines, with the rank of the `machine` at fault if it is known."""

    def __init__(self, text: str, machine: int | None = None) -> None:
        super().__init__(text)
        self.machine = machine


class LaunchError(Exception):
    """A launch that cannot become a run: the same message on every machine, and exit code 2."""


@dataclass(frozen=True)
class HostShare:
    """The part of a host that one process may use: process number `index` of `count`, which divide devices and memory."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class Machine:
    """One process of the run, with all its devices. `host` is the name by which its owner knows it."""

    rank: int
    host: str
    share: HostShare = HostShare()

    def __str__(self) -> str:
        return f"machine {self.rank} ({self.host})"


class Channel:
    """A thread's way to gather values of all machines, all equally often. Its own gloo `group` keeps threads apart."""

    def __init__(self, group: ProcessGroup, machines: "MachineGroup") -> None:
        self._group = group
        self._machines = machines

    def gather(self, value: Any, what: str) -> list[Any]:
        """Gather each machine's JSON value by rank. `what` names it in messages. Raises MachineError if one is lost."""
        text = json.dumps(value).encode()
        try:
            lengths = [int(length) for length in self._exchange(torch.tensor([len(text)]))]
            padded = bytearray(text.ljust(max(lengths), b"\0"))
            texts = self._exchange(torch.frombuffer(padded, dtype=torch.uint8))
        except RuntimeError as error:
            raise self._machines.explain(error, None, what) from error
        return [
            json.loads(found.numpy().tobytes()[:length]) for found, length in zip(texts, lengths, strict=True)
        ]

    def _exchange(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self._group.size())]
        work = self._group.allgather([found], [own])
        while True:
            try:
                work.wait(LOOK_EVERY)
                return found
            except RuntimeError:  # gloo's error, or only the end of this wait
                if self._machines.is_aborted:
                    raise
                if work.is_completed():  # perhaps since that wait ended, and then without an error
                    work.wait()
                    return found


class MachineGroup:
    """All machines of a run, seen from one of them. `peers` are the ranks of the others."""

    def __init__(
        self,
        store: Store,
        rank: int,
        machines: Sequence[Machine],
        *,
        address: str,
        timeout_s: float = 60.0,
        connections: int = 4,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Connect to each of the others. Every machine calls this within `start_timeout_s`, with a `store` of their own.

        `address` is this machine's one in the network that the run uses. `timeout_s` is the silence after which a machine is
        lost, `connections` the number of gloo groups that carry tensors. Raises `LaunchError` if not all machines come.
        """
        self.rank, self.size = rank, len(machines)
        self.machines = tuple(machines)
        self.peers = [machine.rank for machine in machines if machine.rank != rank]
        self.fault: MachineError | None = None
        self._lock = threading.Lock()
        self._has_failed = self.is_aborted = False
        self._call: Callable[[MachineError], None] | None = None
        self._waited_for = ""
        self._has_told = threading.Event()
        self._liveness = Liveness(store, rank, self.size, timeout_s, self._lose)
        carriers = [f"data/{index}" for index in range(connections)]
        self._groups = self._connect(store, address, [*CHANNELS, *carriers], start_timeout_s)
        self._channels = {name: Channel(self._groups[name], self) for name in CHANNELS}
        data_groups, timeout = [self._groups[name] for name in carriers], timedelta(seconds=timeout_s)
        self._links = {
            (peer, purpose): Link(peer, purpose, data_groups, self.explain, timeout)
            for peer in self.peers
            for purpose in Purpose
        }
        self._liveness.start()

    def channel(self, name: str) -> Channel:
        return self._channels[name]

    def link(self, peer: int, purpose: Purpose) -> Link:
        return self._links[peer, purpose]

    def with_each_peer(self, *calls: Callable[[int], object]) -> None:
        """Call each of these with the rank of each peer, all at the same time. Raises the first error."""
        pool = ThreadPoolExecutor(len(calls) * self.size)
        try:
            for call in [pool.submit(call, peer) for peer in self.peers for call in calls]:
                call.result()
        finally:
            pool.shutdown(wait=False)  # after an error the others may wait until the caller ends the group

    def on_fault(self, call: Callable[[MachineError], None]) -> None:
        """Call `call`, in place of the one before, once another machine has failed or is lost; not after a `fail` here."""
        with self._lock:
            fault = None if self._has_failed else self.fault
            self._call = call if fault is None else None  # each call is made once
        if fault is not None:
            call(fault)

    def explain(self, error: Exception, peer: int | None, waited_for: str) -> MachineError:
        """Find the fault behind a gloo error within a few beats, and end the group. `peer` None: it waited for all."""
        if isinstance(error, MessageError):  # the connection works: nothing of the peer is lost
            assert peer is not None, "only a link reads messages"
            found = self._liveness.report(
                MachineFault(self.rank, f"has failed: {error}, from {self.machines[peer]}")
            )
            self.abort()  # the next bytes would be the rest of that message
            return self._set_fault(found, waited_for)
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
            if self.is_aborted:
                return
            self.is_aborted = True
            # A thread of gloo that holds a part of a message is never woken, and the end of its group would wait for it.
            for group in self._groups.values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        for group in self._groups.values():
            # The first peer whose connection still works makes the receive time out, which closes all of them.
            for peer in self.peers:
                with suppress(RuntimeError):
                    group.recv([torch.zeros(1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """End the group. Every machine calls this when it has nothing more to exchange; all wait for the last one."""
        if self.fault is None and not self.is_aborted:
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
        """Complete the fault with what this thread waited for; the first one becomes the group's."""
        who = "a machine" if found.machine is None else str(self.machines[found.machine])
        text = f"{who} {found.problem}"
        if waited_for:
            text += f"; {self.machines[self.rank]} waited for {waited_for}"
        error = MachineError(text, found.machine)
        with self._lock:
            if self.fault is None:
                self.fault = error
        return error

    def _connect(
        self, store: Store, address: str, names: list[str], timeout_s: float
    ) -> dict[str, ProcessGroup]:
        # On a thread of its own: gloo takes the time-out for its operations, a day, as the one for connecting too.
        gloo: Any = ProcessGroupGloo  # its types do not know its options
        groups: dict[str, ProcessGroup] = {}
        errors: list[Exception] = []

        def connect() -> None:
            try:
                for name in names:
                    options = gloo._Options()
                    options._timeout, options._threads = DAY, 1
                    options._devices = [gloo.create_device(hostname=address)]
                    groups[name] = gloo(PrefixStore(f"group/{name}", store), self.rank, self.size, options)
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=connect, name="machines-connect", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if errors or thread.is_alive():
            reason = str(errors[0]).splitlines()[0] if errors else f"no answer within {timeout_s:g} s"
            others = ", ".join(str(self.machines[peer]) for peer in self.peers)
            raise LaunchError(
                f"{self.machines[self.rank]} at address {address} cannot connect to {others}: {reason}. Every machine "
                "must reach every other one on all ports"
            ) from (errors[0] if errors else None)
        return groups


def measure_rate(group: MachineGroup, trial_bytes: int = TRIAL_BYTES, seconds: float = MEASURED_S) -> float:
    """Measure the bytes/s that each machine sends and receives at once, the least of all machines, as all get it.

    All pairs send at once, as they do in a step. The first exchange, of `trial_bytes`, only shows how many bytes the second
    one may have to take about `seconds`. Raises `MachineError`.
    """
    channel, what = group.channel("start"), "bytes that measure the network"

    def rate_of(num_bytes: float) -> float:
        data = torch.zeros(max(int(num_bytes) // len(group.peers), 1), dtype=torch.uint8)

        def receive(peer: int) -> None:
            for _ in group.link(peer, Purpose.TRIAL).chunks(data.numel(), torch.uint8, what):
                pass

        channel.gather(None, "the start of a measurement of the network")
        start_s = time.perf_counter()
        group.with_each_peer(lambda peer: group.link(peer, Purpose.TRIAL).send(data, what), receive)
        own_rate = data.numel() * len(group.peers) / (time.perf_counter() - start_s)
        return float(min(channel.gather(own_rate, "its measured rate of the network")))

    return rate_of(min(max(rate_of(trial_bytes) * seconds, trial_bytes), MOST_BYTES))

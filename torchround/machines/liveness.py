"""How a machine learns that another one is lost: beats in the store, and the first fault that any machine reports.

Gloo is given no short time-outs: a machine may wait for minutes while another compiles or saves. Each machine counts a
number in the store up instead, once per beat. One that stays the same for `timeout_s` is a machine that is stopped, hangs, or
has lost its network.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

BEAT_S = 1.0
# So many beats fit into the shortest time-out, so that one late beat is no silence.
BEATS_PER_TIMEOUT = 5
# A machine that is alive has counted up at least once between the first and the last of so many readings.
READINGS_TO_TELL = 3
# The machine that is named if the store cannot be reached.
STORE_RANK = 0


@dataclass(frozen=True)
class MachineFault:
    """What ended a run on several machines. `machine` is a rank, None if it is not known which machine it was."""

    machine: int | None
    problem: str


class SilenceClock:
    """Each machine's silence while this one ran. An observation counts as two beats at most: this one may have been stopped."""

    def __init__(self, num_machines: int, beat_s: float, now_s: float) -> None:
        self.silent_s = [0.0] * num_machines
        self._beat_s = beat_s
        self._beats = [-1] * num_machines
        self._last_s = now_s

    def observe(self, beats: Sequence[int], now_s: float) -> None:
        """Take the numbers read last, the same ones again if nothing was read since."""
        passed_s = min(now_s - self._last_s, 2 * self._beat_s)
        self._last_s = now_s
        for rank, beat in enumerate(beats):
            self.silent_s[rank] = 0.0 if beat != self._beats[rank] else self.silent_s[rank] + passed_s
        self._beats = list(beats)


class Liveness:
    """Two threads, as the store may block: one talks to it, one calls `on_fault` once if a machine failed or is silent."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_machines: int,
        timeout_s: float,
        on_fault: Callable[[MachineFault], None],
    ) -> None:
        self.fault: MachineFault | None = None
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._on_fault = on_fault
        self._beat_s = min(BEAT_S, timeout_s / BEATS_PER_TIMEOUT)
        self._keys = [f"beat/{other}" for other in range(num_machines)]
        self._clock = SilenceClock(num_machines, self._beat_s, time.monotonic())
        self._changed = threading.Condition()  # guards everything below
        self._beats = [0] * num_machines
        self._num_readings = 0
        self._report: MachineFault | None = None
        self._is_ended = False
        self._store_problem = ""
        self._wake = threading.Event()  # the storing thread has something to write, or shall end
        self._threads = [
            threading.Thread(target=target, name=f"machines-{name}", daemon=True)
            for name, target in (("beats", self._beat), ("watch", self._watch))
        ]
        store.set(self._keys[rank], "0")
        store.compare_set("fault", "", "")

    def start(self) -> None:
        """Start to beat and to watch. Every machine must have made its `Liveness`."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop both threads. A thread that a dead network holds in the store is left behind."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        self._wake.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self._beat_s)

    def report(self, fault: MachineFault) -> MachineFault:
        """Report a fault to all machines, within two beats. Return the fault that was first, which may be another one."""
        with self._changed:
            if self.fault is None and self._report is None:
                self._report = fault
                self._wake.set()
                self._changed.wait_for(lambda: self.fault is not None or self._is_ended, 2 * self._beat_s)
            if self.fault is None:
                self.fault = fault
            return self.fault

    def cause(self, peer: int | None) -> MachineFault:
        """Find the fault behind a broken connection: the one that a machine reports within a few beats.

        If there is none, it is the machine that gave no beat meanwhile, otherwise `peer`, the other end if that is known.
        """
        with self._changed:
            self._wake.set()  # read now, not at the next beat: the machine at fault has usually told it before
            self._wait_for_readings(2)  # the first may have begun before the connection broke
            before = list(self._beats)
            self._wait_for_readings(READINGS_TO_TELL)
            if self.fault is not None:
                return self.fault
            same = [rank for rank, beat in enumerate(self._beats) if beat == before[rank]]
            silent = [rank for rank in same if rank != self._rank]
        if silent and peer not in silent:
            peer = max(silent, key=self._clock.silent_s.__getitem__)
        return self.report(MachineFault(peer, "has ended or lost its network: its connections are closed"))

    def _wait_for_readings(self, count: int) -> None:
        last = self._num_readings + count
        self._changed.wait_for(
            lambda: self.fault is not None or self._is_ended or self._num_readings >= last,
            (count + 1) * self._beat_s,
        )

    def _beat(self) -> None:
        count = 0
        while not self._is_ended and self.fault is None:
            count += 1
            try:
                self._store.set(self._keys[self._rank], str(count))
                *beats, fault = self._store.multi_get([*self._keys, "fault"])
                if not fault and self._report is not None:
                    text = json.dumps([self._report.machine, self._report.problem])
                    fault = self._store.compare_set("fault", "", text)  # the first one wins
            except RuntimeError as error:
                with self._changed:
                    self._store_problem = str(error).partition("\n")[0] or "no answer"
                    self._changed.notify_all()
                return
            with self._changed:
                self._beats = [int(beat) for beat in beats]
                self._num_readings += 1
                if fault:
                    self.fault = self.fault or MachineFault(*json.loads(fault))
                self._changed.notify_all()
            self._wake.wait(self._beat_s)
            self._wake.clear()

    def _watch(self) -> None:
        store_clock = SilenceClock(1, self._beat_s, time.monotonic())
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_ended or self.fault or self._store_problem, self._beat_s
                )
                if self._is_ended:
                    return
                now_s = time.monotonic()
                store_clock.observe([self._num_readings], now_s)
                if store_clock.silent_s[0] == 0:
                    self._clock.observe(self._beats, now_s)
                found = self.fault
                silent_s, rank = max((silent, rank) for rank, silent in enumerate(self._clock.silent_s))
                if found is None and (self._store_problem or store_clock.silent_s[0] >= self._timeout_s):
                    how = self._store_problem or f"no answer for {self._timeout_s:g} s"
                    problem = f"cannot be reached, and keeps the store through which the machines find each other ({how})"
                    found = MachineFault(STORE_RANK, problem)
                elif found is None and silent_s >= self._timeout_s and rank != self._rank:
                    problem = f"has given no sign of life for {self._timeout_s:g} s: it is stopped, hangs, or has no network"
                    found = MachineFault(rank, problem)
            if found is not None:
                self._on_fault(self.report(found))
                return

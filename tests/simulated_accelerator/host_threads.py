"""Reports to the simulated accelerator's scheduler which threads of the engine run and which wait.

The scheduler serves a thread that waits for a device only when every registered thread waits. Nothing else could
happen then, so its choice does not depend on how fast a thread is. The simulator knows the waits inside itself. It
cannot see Python's own waits. This module reports those. It replaces, for one test, the few functions of Python
through which the engine's threads start, wait, wake each other, sleep and end.

A waker reports that a thread runs again before it wakes the thread. Otherwise the scheduler could take the woken
thread for a waiting one until the operating system runs it.
"""

import threading
import time
from collections import deque

# The engine names its threads so: workers, optimizer, saver, readers of files, and helpers that await a device's end.
OUR_THREADS = ("torchround", "finish ")


class HostWait:
    """Its end is reported exactly once, by the waker or by the waiter. Without a `number` nothing is reported."""

    def __init__(self, controls, number):
        self._controls = controls
        self._number = number
        self._lock = threading.Lock()
        if number is not None:
            controls.host_blocks(number)

    def end(self):
        with self._lock:
            number, self._number = self._number, None
        if number is not None:
            self._controls.host_unblocks(number)


class HostThreads:
    """The registered threads of one test: the test's own thread, and the engine's threads while they live."""

    def __init__(self, controls):
        self._controls = controls
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def install(self, monkeypatch):
        replaced = (
            (threading.Condition, "wait", self._reporting_wait),
            (threading.Condition, "notify", self._reporting_notify),
            (threading.Thread, "start", self._reporting_start),
            (threading.Thread, "join", self._reporting_join),
            (time, "sleep", self._reporting_sleep),
        )
        for owner, name, reporting in replaced:
            monkeypatch.setattr(owner, name, reporting(getattr(owner, name)))
        self._enter()

    def uninstall(self):
        self._leave()

    def _enter(self):
        number = self._controls.register_thread()
        with self._lock:
            self._numbers[threading.get_ident()] = number

    def _leave(self):
        with self._lock:
            number = self._numbers.pop(threading.get_ident())
        self._controls.unregister_thread(number)

    def _begin_wait(self):
        with self._lock:
            number = self._numbers.get(threading.get_ident())
        return HostWait(self._controls, number)

    def _reporting_wait(self, wait):
        def reporting(condition, timeout=None):
            # Wait and notify run under the condition's lock, so this queue is in the order of the condition's own.
            queue: deque[HostWait] = condition.__dict__.setdefault("reported_waits", deque())
            mine = self._begin_wait()
            queue.append(mine)
            try:
                return wait(condition, timeout)
            finally:
                mine.end()
                if mine in queue:  # the time ran out; the lock is held again here
                    queue.remove(mine)

        return reporting

    def _reporting_notify(self, notify):
        def reporting(condition, n=1):
            queue: deque[HostWait] = condition.__dict__.get("reported_waits", deque())
            for _ in range(min(n, len(queue))):
                queue.popleft().end()
            notify(condition, n)

        return reporting

    def _reporting_start(self, start):
        def reporting(thread):
            if not thread.name.startswith(OUR_THREADS):
                start(thread)
                return
            run, is_known = thread.run, threading.Lock()

            def registered_run():
                self._enter()
                is_known.release()
                try:
                    run()
                finally:
                    with self._lock:
                        joining = thread.__dict__.pop("reported_joins")
                    for wait in joining:
                        wait.end()
                    self._leave()

            thread.__dict__["reported_joins"] = []
            thread.run = registered_run
            # The starter counts as running until the new thread is known. Otherwise the scheduler could find that
            # all threads wait while the new one is on its way.
            is_known.acquire()
            with self._lock:
                number = self._numbers.pop(threading.get_ident(), None)
            start(thread)
            is_known.acquire()
            if number is not None:
                with self._lock:
                    self._numbers[threading.get_ident()] = number

        return reporting

    def _reporting_join(self, join):
        def reporting(thread, timeout=None):
            with self._lock:
                joining: list[HostWait] | None = thread.__dict__.get("reported_joins")
            if joining is None:  # not ours, or at its end
                join(thread, timeout)
                return
            wait = self._begin_wait()
            with self._lock:
                has_ended = "reported_joins" not in thread.__dict__
                if not has_ended:
                    joining.append(wait)
            if has_ended:
                wait.end()
            try:
                join(thread, timeout)
            finally:
                wait.end()

        return reporting

    def _reporting_sleep(self, sleep):
        def reporting(seconds):
            wait = self._begin_wait()
            try:
                sleep(seconds)
            finally:
                wait.end()

        return reporting

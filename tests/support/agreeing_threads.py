"""Machines as threads of a test that exchange values through a barrier, as JSON does, without a network."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Gather = Callable[[Any], list[Any]]


def run_agreeing(num_machines, function):
    """Return what `function(machine, gather)` returns on each of several threads. Raises the first machine's error."""
    barrier = threading.Barrier(num_machines)
    values = [None] * num_machines

    def gather_on(machine):
        def gather(value):
            values[machine] = json.dumps(value)
            barrier.wait()
            found = [json.loads(each) for each in values]
            barrier.wait()  # a machine may begin the next exchange only once all have read this one
            return found

        return gather

    def work(machine):
        try:
            return function(machine, gather_on(machine))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_machines) as threads:
        futures = [threads.submit(work, machine) for machine in range(num_machines)]
    errors = [future.exception() for future in futures]
    own = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    for error in (*own, *filter(None, errors)):
        raise error
    return [future.result() for future in futures]

"""The former name of `processes.py`, for tests and scripts that run the functions of `scenarios.py`."""

from contextlib import contextmanager

from tests.support.processes import Child, Processes

__all__ = ["Child", "ForkServer", "fork_server_in"]


class ForkServer(Processes):
    """`Processes` whose functions are in `scenarios.py`."""

    def start(self, scenario, *arguments, folder, environment=None):
        function = scenario if ":" in scenario else f"tests.support.scenarios:{scenario}"
        return super().start(function, *arguments, folder=folder, environment=environment)


@contextmanager
def fork_server_in(folder):
    fork_server = ForkServer(folder)
    try:
        yield fork_server
    finally:
        fork_server.close()

"""One fork server for all tests here: it imports torch once."""

from collections.abc import Iterator

import pytest

from tests.support.fork_server import ForkServer, fork_server_in


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Return the server that forks processes that train."""
    with fork_server_in(tmp_path_factory.mktemp("children")) as fork_server:
        yield fork_server

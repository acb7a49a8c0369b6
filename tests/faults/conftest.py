"""One zygote for all tests here: it imports torch once."""

from collections.abc import Iterator

import pytest

from tests.support.fork_server import ForkServer, fork_server_in


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks processes that train."""
    with fork_server_in(tmp_path_factory.mktemp("children")) as zygote:
        yield zygote

"""One zygote for all tests here: it imports torch once."""

from collections.abc import Iterator

import pytest

from tests.faults.zygote import Zygote, zygote_in


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks processes that train."""
    with zygote_in(tmp_path_factory.mktemp("children")) as zygote:
        yield zygote

"""The helpers of model tests as one fixture."""

import pytest

from tests.support import model_tools


@pytest.fixture(scope="session")
def tools():
    """Return the functions of `tests/support/model_tools.py`."""
    return model_tools

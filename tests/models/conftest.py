"""The helpers of model tests as one fixture, and layers that take the CPU for an accelerator."""

import pytest

from tests.support import model_tools
from torchround.models.kernels import operation


@pytest.fixture(scope="session")
def tools():
    """Return the functions of `tests/support/model_tools.py`."""
    return model_tools


@pytest.fixture
def fused(monkeypatch):
    """Let layers call fused operations on the CPU, which run their plain references."""
    monkeypatch.setattr(operation, "is_accelerator", lambda kind: True)

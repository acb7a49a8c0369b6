"""All Triton kernels in Triton's interpreter: each gives what float64 or its reference gives."""

import pytest

from tests.support import gated_cases, grouped_cases, loss_cases, norm_cases, sink_cases
from tests.support.interpreted import outcomes

# Triton takes tens of seconds, so these are no part of the default tier.
pytestmark = pytest.mark.compiles

MODULES = (gated_cases, grouped_cases, loss_cases, norm_cases, sink_cases)


@pytest.mark.parametrize("cases", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_triton_kernels_pass_every_case(cases):
    found = outcomes(cases)
    assert found and {name: problem for name, problem in found.items() if problem} == {}

"""Every fused operation gives what float64 gives: by its plain reference, and by its Triton kernel in the interpreter."""

import pytest

from tests.support import fused_cases
from tests.support.interpreted import case_names, outcomes


@pytest.mark.parametrize("name", case_names(fused_cases))
def test_the_references_pass_every_case(name):
    getattr(fused_cases, name)()


@pytest.mark.compiles  # Triton takes tens of seconds
def test_the_triton_kernels_pass_every_case():
    found = outcomes(fused_cases)
    assert found and {name: problem for name, problem in found.items() if problem} == {}

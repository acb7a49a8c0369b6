"""The plain references of sinks that join a flash kernel's result."""

import pytest

from tests.support import sink_cases
from tests.support.interpreted import assert_rounded, random
from torchround.models.kernels.sink_scores import join_sinks, sinks_gradient


@pytest.mark.parametrize("dtype", sink_cases.DTYPES, ids=str)
def test_the_references_are_those_of_float64(dtype):
    inputs = sink_cases.inputs_of(700, 3, 8, dtype)
    output, joined = join_sinks(*inputs)
    exact, exact_joined = sink_cases.exact_join(*(tensor.double() for tensor in inputs))
    assert_rounded(joined, exact_joined, 32, 20.0)
    assert_rounded(output, exact, 64, inputs[0].double().abs().max().item())
    grad = random(700, 3, 8, dtype=dtype, seed=1)
    gradient = sinks_gradient(grad, output, joined, inputs[2])
    expected = sink_cases.exact_gradient(grad.double(), output.double(), joined.double(), inputs[2].double())
    assert_rounded(gradient, expected, 64 + 8 + 700, 20.0 * 8 * 700)

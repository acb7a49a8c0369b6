"""Cases for Triton's interpreter: sinks that join the softmax of a flash kernel's result."""

from itertools import product

import torch

from tests.support.interpreted import assert_rounded, random

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def exact_join(output, log_sums, sinks):
    joined = torch.logaddexp(log_sums, sinks[:, None])
    return output * (log_sums - joined).exp().T[..., None], joined


def inputs_of(tokens, heads, channels, dtype):
    log_sums = 3 * random(heads, tokens)
    return [random(tokens, heads, channels, dtype=dtype), log_sums, 3 * random(heads, dtype=dtype)]


def exact_gradient(grad, output, log_sums, sinks):
    """Differentiate the softmax's share of the sinks: the output falls by what they take."""
    scores = sinks.detach().clone().requires_grad_()
    # With the sink's share s, d output / d score = -s output.
    share = (scores[:, None] - log_sums).exp().detach() * (scores[:, None] - scores[:, None].detach() + 1)
    return torch.autograd.grad(-(share.T[..., None] * output * grad).sum(), scores)[0]


def case_sinks_and_their_gradient():
    from torchround.models.kernels.sink_scores_triton import launch_join_sinks, launch_join_sinks_backward

    for (tokens, heads, channels), dtype in product([(5, 4, 16), (1, 3, 6), (0, 2, 4)], DTYPES):
        output, log_sums, sinks = inputs_of(tokens, heads, channels, dtype)
        found, joined = launch_join_sinks(output, log_sums, sinks)
        assert found.shape == output.shape and joined.shape == log_sums.shape
        if tokens == 0:
            continue
        wide = [output.double(), log_sums.double(), sinks.double()]
        exact, exact_joined = exact_join(*wide)
        # Exponentials turn the rounding of an argument of up to 20 into as many roundings.
        assert_rounded(joined, exact_joined, 32, 20.0)
        assert_rounded(found, exact, 64, wide[0].abs().max().item())
        grad = random(tokens, heads, channels, dtype=dtype, seed=1)
        partials = launch_join_sinks_backward(grad, found, joined, sinks)
        expected = exact_gradient(grad.double(), found.double(), joined.double(), wide[2])
        assert_rounded(partials.sum(dim=0), expected, 64 + channels + tokens, 20.0 * channels * tokens)

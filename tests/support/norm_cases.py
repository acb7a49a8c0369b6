"""Cases for Triton's interpreter: RMS norm, the residual stream's additions in it, and rotation of heads."""

from itertools import product

import torch
from torch import Tensor

from tests.support.interpreted import assert_rounded, random
from torchround.models.kernels.norms import num_partials, tokens_each

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight


def exact_rotation(heads: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float) -> Tensor:
    # The angle is rounded to fp32, as in the kernel: a rounding of it is a rotation of its own, which is no error here.
    angles = (positions[..., None, None].float() * frequencies).double()
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def leaf(x: Tensor) -> Tensor:
    return x.double().requires_grad_()


def case_norm() -> None:
    from torchround.models.kernels.norms_triton import launch_norm

    # A width that is a power of two, others, and a single token or channel.
    for (tokens, width), dtype in product([(5, 64), (3, 100), (1, 33), (2, 1), (0, 16)], DTYPES):
        x, weight = random(tokens, width, dtype=dtype), random(width, dtype=dtype)
        total, normed, scales = launch_norm(x, None, weight, EPS)
        assert total is x and scales.shape == (tokens,) and normed.dtype == dtype
        if tokens:
            assert_rounded(normed, exact_norm(x.double(), weight.double()), width + 8)


def case_norm_of_a_sum() -> None:
    from torchround.models.kernels.norms_triton import launch_norm

    for (tokens, width), dtype in product([(5, 64), (1, 33)], DTYPES):
        stream, update = random(2, tokens, width, dtype=dtype, seed=1)
        weight = random(width, dtype=dtype)
        total, normed, scales = launch_norm(stream, update, weight, EPS)
        assert_rounded(total, stream.double() + update.double(), 2)
        # The norm and its scale are of the sum as it was rounded.
        assert_rounded(normed, exact_norm(total.double(), weight.double()), width + 8)
        exact_scales = (total.double().square().mean(dim=-1) + EPS).rsqrt()
        assert_rounded(scales, exact_scales, width + 8)


def case_norm_backward() -> None:
    from torchround.models.kernels.norms_triton import launch_norm_backward

    every = product([(5, 64), (1, 33)], DTYPES, (False, True), (False, True))
    # Programs with two tokens each, except the last one.
    assert tokens_each(515) == 2, "more tokens than programs"
    for (tokens, width), dtype, adds, trains in [*every, ((515, 6), torch.float32, True, True)]:
        total, grad, passed = random(3, tokens, width, dtype=dtype, seed=2)
        weight = random(width, dtype=dtype)
        x, gain = leaf(total), leaf(weight)
        scales = (total.float().square().mean(dim=-1) + EPS).rsqrt()
        exact, exact_weight = torch.autograd.grad(exact_norm(x, gain), (x, gain), grad.double())
        found, partials = launch_norm_backward(grad, passed if adds else None, total, weight, scales, trains)
        # Terms that cancel are no larger than scale * grad * weight * (1 + normed^2).
        largest = (scales.max() * (grad.abs().max() * weight.abs().max() * (1 + width))).item()
        exact = exact + passed.double() if adds else exact
        assert_rounded(found, exact, width + 8, largest, "input")
        assert partials.shape == (num_partials(tokens) if trains else 0, width)
        if trains:
            normed = (total.float() * scales[:, None]).abs().max().item()
            each = grad.abs().max().item() * normed
            assert_rounded(partials.sum(dim=0), exact_weight, tokens + width + 8, each * tokens, "weight")


def case_rotation() -> None:
    from torchround.models.kernels.norms_triton import launch_rotation

    # Heads of 6 channels have 3 pairs: neither number is a power of two.
    for (heads, channels), dtype in product([(4, 16), (3, 6), (1, 2)], DTYPES):
        x = random(2, 5, heads, channels, dtype=dtype, seed=3)
        positions = torch.tensor([[0, 1, 2, 0, 1], [7, 1000, 100000, 3, 4]])
        frequencies = torch.linspace(1.0, 0.01, channels // 2)
        for back in (False, True):
            rotated, _ = launch_rotation(x, positions, frequencies, 1.3, None, 0.0, back)
            turn = -frequencies if back else frequencies
            exact = exact_rotation(x.double(), positions, turn, 1.3)
            assert_rounded(rotated, exact, 8, 3 * exact.abs().max().item())


def case_normed_rotation_and_its_backward() -> None:
    from torchround.models.kernels.norms_triton import launch_rotation, launch_rotation_backward

    for (heads, channels), dtype, trains in product([(4, 16), (3, 6)], DTYPES, (False, True)):
        x, grad = random(2, 2, 5, heads, channels, dtype=dtype, seed=4)
        weight = random(channels, dtype=dtype)
        positions = torch.tensor([[0, 1, 2, 0, 1], [7, 1000, 100000, 3, 4]])
        frequencies = torch.linspace(1.0, 0.01, channels // 2)
        wide, gain = leaf(x), leaf(weight)
        exact = exact_rotation(exact_norm(wide, gain), positions, frequencies, 1.3)
        rotated, scales = launch_rotation(x, positions, frequencies, 1.3, weight, EPS)
        assert_rounded(rotated, exact.detach(), channels + 16, 3 * exact.abs().max().item(), "forward")
        exact_grad, exact_weight = torch.autograd.grad(exact, (wide, gain), grad.double())
        found, partials = launch_rotation_backward(grad, positions, frequencies, 1.3, x, weight, scales, trains)
        inner = 3 * grad.abs().max().item()  # a rotated gradient: two terms, times 1.3
        largest = scales.max().item() * inner * weight.abs().max().item() * (1 + channels)
        assert_rounded(found, exact_grad, channels + 16, largest, "input")
        assert partials.shape == (num_partials(10) if trains else 0, channels)
        if trains:
            normed = (x.float() * scales[..., None]).abs().max().item()
            terms = 10 * heads
            assert_rounded(partials.sum(dim=0), exact_weight, terms + 16, inner * normed * terms, "weight")

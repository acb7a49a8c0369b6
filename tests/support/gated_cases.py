"""Cases for Triton's interpreter: SwiGLU and GeGLU, GPT-OSS's clamped product, and the biases of experts."""

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.interpreted import assert_rounded, random

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIMIT, ALPHA = 1.5, 1.7
# Rounded terms on the way to an element: an exponential turns the rounding of its argument into as many as that is large.
TERMS = 128


def exact_gated_product(gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up if weights is None else active * up * weights[:, None]


def exact_clamped_product(gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    biased = gate_up + bias[experts]
    gate, up = biased[:, ::2], biased[:, 1::2]
    # At the limit itself the gradient passes. PyTorch 2.15 stops it in its clamp.
    gate, up = gate.where(gate <= LIMIT, LIMIT), up.where(up.abs() <= LIMIT, LIMIT * up.detach().sign())
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1) * weights[:, None]


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def routed(rows: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return the sorted expert of each row and the end of each expert's rows. The last but one has none."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(experts, (rows,), generator=generator).sort().values
    chosen[chosen == experts - 2] = experts - 1
    ends = torch.searchsorted(chosen, torch.arange(experts), right=True, out_int32=True)
    return chosen, ends


def case_gated_product_and_its_backward() -> None:
    from torchround.models.kernels.gated_products_triton import launch_gated_product, launch_gated_product_backward

    # 1030 columns are two passes of a program, the second one mostly empty.
    shapes = [(3, 64), (1, 37), (2, 1030), (0, 8)]
    for (rows, width), dtype, activation, weighs in product(shapes, DTYPES, ("silu", "gelu_tanh"), (False, True)):
        gate, up, grad = random(3, rows, width, dtype=dtype)
        weights = random(rows) if weighs else None
        found = launch_gated_product(gate, up, weights, activation)
        *gradients, grad_weights = launch_gated_product_backward(grad, gate, up, weights, activation)
        assert grad_weights.shape == ((rows,) if weighs else (0,))
        if rows == 0:
            continue
        inputs = wide(gate, up, *([weights] if weights is not None else []))
        exact = exact_gated_product(*inputs, *([] if weighs else [None]), activation)
        expected = torch.autograd.grad(exact, inputs, grad.double())
        assert_rounded(found, exact.detach(), TERMS)
        for name, one, other in zip(("gate", "up"), gradients, expected, strict=False):
            assert_rounded(one, other, TERMS, 4 * (grad.abs().max() * 4).item(), name)
        if weighs:
            assert_rounded(grad_weights, expected[2], TERMS + width, 40.0 * width, "weights")


def case_clamped_product_and_its_backward() -> None:
    from torchround.models.kernels.gated_products_triton import launch_clamped_product, launch_clamped_product_backward

    for (rows, width), dtype in product([(7, 16), (2, 1030), (0, 8)], DTYPES):
        experts, _ = routed(rows, 4)
        gate_up, bias = 2 * random(rows, 2 * width, dtype=dtype), random(4, 2 * width, dtype=dtype)
        weights, grad = random(rows), random(rows, width, dtype=dtype)
        found = launch_clamped_product(gate_up, bias, experts, weights, LIMIT, ALPHA)
        gradients = launch_clamped_product_backward(grad, gate_up, bias, experts, weights, LIMIT, ALPHA)
        assert found.shape == (rows, width)
        if rows == 0:
            continue
        inputs = wide(gate_up, weights)
        exact = exact_clamped_product(inputs[0], bias.double(), experts, inputs[1])
        expected = torch.autograd.grad(exact, inputs, grad.double())
        # The largest terms: gates are not limited below, but little of them passes.
        largest = (grad.abs().max() * weights.abs().max()).item() * 10
        assert_rounded(found, exact.detach(), TERMS, 10 * weights.abs().max().item())
        assert_rounded(gradients[0], expected[0], TERMS, largest, "gate and up")
        assert_rounded(gradients[1], expected[1], TERMS + width, 10.0 * width, "weights")


def case_biases_of_experts() -> None:
    from torchround.models.kernels.gated_products_triton import (
        launch_dot_with_bias,
        launch_expert_bias,
        launch_sum_by_expert,
    )

    # 130 columns are two programs for each expert, 100 rows several passes of one.
    for (rows, width), dtype in product([(100, 130), (3, 7), (0, 5)], DTYPES):
        experts, ends = routed(rows, 5)
        x, bias, weights = random(rows, width, dtype=dtype), random(5, width, dtype=dtype), random(rows)
        added = launch_expert_bias(x, bias, experts, weights)
        dots = launch_dot_with_bias(x, bias, experts)
        exact_bias = bias.double()[experts]
        if rows:
            assert_rounded(added, x.double() + exact_bias * weights.double()[:, None], 4, 20.0)
            assert_rounded(dots, (x.double() * exact_bias).sum(dim=-1), width + 4, 20.0 * width)
        for factors in (None, weights):
            found = launch_sum_by_expert(x, ends, factors)
            terms = x.double() if factors is None else x.double() * factors.double()[:, None]
            exact = torch.zeros(5, width, dtype=torch.float64).index_add(0, experts, terms)
            assert (found[3] == 0).all(), "an expert without rows"
            assert_rounded(found, exact, rows + 4, 20.0 * (rows + 1))

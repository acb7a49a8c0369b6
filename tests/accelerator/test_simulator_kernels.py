"""The simulated accelerator's own kernels give what plain PyTorch gives on the CPU, and refuse what a card's refuse.

The references compute in float64. Kernels compute in float32 and round once: by at most half of `eps`, relative to the
largest element. Gradients of attention use the rounded output, as on a card, so they differ by a few such roundings.
"""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.support.plain_flash import plain_backward_kernel, plain_forward_kernel

DEVICE = "simulated:0"
FLOAT32_SUMS = 1e-4  # relative to the largest element: sums of at most 64 products in float32, taken generously


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_rounded(found, wanted, roundings=1):
    allowed = (roundings * torch.finfo(found.dtype).eps + FLOAT32_SUMS) * wanted.abs().max()
    assert found.shape == wanted.shape
    assert (found.cpu().double() - wanted).abs().max() <= allowed


def leaves(*shapes, dtype):
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]
    return [t.to(DEVICE).requires_grad_() for t in drawn], [t.double().requires_grad_() for t in drawn]


@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_offsets_keeps_documents_apart(simulator, window):
    dtype = torch.bfloat16
    shapes = ((20, 4, 8), (20, 2, 8), (20, 2, 8))
    (query, key, value), plain = leaves(*shapes, dtype=dtype)
    ends = [0, 7, 8, 20, 20]
    offsets = torch.tensor(ends, dtype=torch.int32).to(DEVICE)
    sides = {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
    arguments = (offsets, offsets, 12, 12, 0.0, window is None)
    output, log_sums, state, *_ = torch.ops.aten._flash_attention_forward(
        query.detach(), key.detach(), value.detach(), *arguments, False, **sides
    )
    grad = torch.randn(20, 4, 8).to(dtype)
    gradients = torch.ops.aten._flash_attention_backward(
        *(grad.to(DEVICE), query.detach(), key.detach(), value.detach(), output, log_sums),
        *(*arguments, state, torch.empty(0, device=DEVICE)),
        **sides,
    )
    heads = [t.detach() for t in plain]
    wanted, sums, _ = plain_forward_kernel(*heads, torch.tensor(ends[1:]), 12, window)
    wanted_gradients = plain_backward_kernel(
        grad.double(), *heads, wanted, sums, torch.tensor(ends[1:]), 12, window, None, None
    )
    assert_rounded(output, wanted)
    assert_rounded(log_sums, sums)
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        assert_rounded(found, expected, roundings=4)


def test_grouped_products_and_their_gradients_are_those_of_a_loop(simulator):
    (rows, stack), (plain_rows, plain_stack) = leaves((12, 16), (4, 16, 8), dtype=torch.bfloat16)
    ends = [5, 5, 11, 12]
    before = simulator.synchronous_operations()
    output = F.grouped_mm(rows, stack, offs=torch.tensor(ends, dtype=torch.int32).to(DEVICE))
    grad = torch.randn(12, 8).to(torch.bfloat16)
    output.backward(grad.to(DEVICE))
    copies = {"blocking copy to device": 2}
    assert {
        k: v - before.get(k, 0) for k, v in simulator.synchronous_operations().items() if v != before.get(k)
    } == copies
    parts = [plain_rows[i:j] @ plain_stack[e] for e, (i, j) in enumerate(itertools.pairwise([0, *ends]))]
    torch.cat(parts).backward(grad.double())
    assert_rounded(output.detach(), torch.cat(parts).detach())
    assert_rounded(rows.grad, plain_rows.grad)
    assert_rounded(stack.grad, plain_stack.grad)

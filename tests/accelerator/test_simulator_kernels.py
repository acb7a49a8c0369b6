"""The simulated accelerator's own kernels give what plain PyTorch gives on the CPU, and refuse what a card's refuse.

The references compute in float64. Kernels compute in float32 and round once: by at most half of `eps`, relative to the
largest element. Gradients of attention use the rounded output, as on a card, so they differ by a few such roundings.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

DEVICE = "simulated:0"
HALVES = [torch.bfloat16, torch.float16]
FLOAT32_SUMS = 1e-4  # relative to the largest element: sums of at most 64 products in float32, taken generously


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_rounded(found: Tensor, wanted: Tensor, roundings: int = 1) -> None:
    """Check a result, which was rounded so many times, against its float64 reference."""
    allowed = (roundings * torch.finfo(found.dtype).eps + FLOAT32_SUMS) * wanted.abs().max()
    assert found.shape == wanted.shape
    assert (found.cpu().double() - wanted).abs().max() <= allowed


def plain_attention(query, key, value, allowed, bias=0.0):
    """Attention of `[B, H, T, C]` by its formula; `allowed [T, T]`. Returns the log-sum-exp too."""
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
    scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Draw tensors of these shapes: on the device, and the same numbers in float64 on the CPU."""
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]
    return [t.to(DEVICE).requires_grad_() for t in drawn], [t.double().requires_grad_() for t in drawn]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_by_offsets_keeps_documents_apart(simulator, dtype, window):
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
    wanted, sums = [], []
    for start, stop in itertools.pairwise(ends):
        rows = [t[start:stop].transpose(0, 1)[None] for t in plain]
        allowed = torch.ones(stop - start, stop - start).tril().bool()
        if window is not None:
            allowed = allowed.triu(1 - window)
        mixed, log_sum = plain_attention(*rows, allowed)
        wanted.append(mixed[0].transpose(0, 1))
        sums.append(log_sum[0])
    torch.cat(wanted).backward(grad.double())
    assert_rounded(output, torch.cat(wanted).detach())
    assert_rounded(log_sums, torch.cat(sums, dim=1).detach())
    for found, leaf in zip(gradients, plain, strict=True):
        assert_rounded(found, leaf.grad, roundings=4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_scaled_dot_product_attention_is_one_kernel_each_way(simulator, dtype, masked):
    shapes = ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    own, plain = leaves(*shapes, dtype=dtype)
    allowed = torch.ones(6, 6).tril().bool()
    if masked:
        allowed[3:, :2] = False
    mask = torch.zeros(1, 1, 6, 6).masked_fill(~allowed, -torch.inf).to(dtype).to(DEVICE) if masked else None
    grad = torch.randn(2, 4, 6, 8).to(dtype)
    simulator.keep_journal(100)
    output = F.scaled_dot_product_attention(*own, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    output.backward(grad.to(DEVICE))
    torch.accelerator.synchronize()
    kernels = [line.split()[-1] for line in simulator.journal() if "attention" in line]
    assert kernels == [f"aten::scaled_dot_product_attention{way}" for way in ("", "_backward")]
    wanted, _ = plain_attention(*plain, allowed)
    wanted.backward(grad.double())
    assert_rounded(output.detach(), wanted.detach())
    for leaf, like in zip(own, plain, strict=True):
        assert_rounded(leaf.grad, like.grad, roundings=4)


def test_a_backward_uses_the_log_sums_that_it_is_given(simulator):
    """Attention with sinks counts on it: it gives others than the forward returned."""
    (query, key, value), _ = leaves(*[(1, 2, 40, 8)] * 3, dtype=torch.float32)
    inputs = [t.detach() for t in (query, key, value)]
    output, log_sums, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        *inputs, None, True, 0.0, True
    )
    assert log_sums.shape == (1, 2, 64), "rows are padded to 32, as on a card"

    def grad_value(sums):
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(torch.ones_like(output), *inputs, None, output, sums, seed, offset, 0.0),
            *([True, True, True, False], True),
        )[2].cpu()

    # With log(2) more in each log-sum-exp, all shares are half as large.
    halved = grad_value(log_sums + torch.tensor(2.0).log().item())
    torch.testing.assert_close(halved * 2, grad_value(log_sums))


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


def test_a_grouped_product_wants_what_a_card_wants(simulator):
    ends = torch.tensor([3], dtype=torch.int32).to(DEVICE)
    with pytest.raises(RuntimeError, match="takes bfloat16"):
        F.grouped_mm(torch.ones(3, 8, device=DEVICE), torch.ones(1, 8, 8, device=DEVICE), offs=ends)
    odd = torch.ones(3, 7, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        F.grouped_mm(odd, torch.ones(1, 7, 8, device=DEVICE, dtype=torch.bfloat16), offs=ends)


@pytest.mark.parametrize("dtype", HALVES)
def test_products_of_16_bits_can_give_float32(simulator, dtype):
    (a, b), (plain_a, plain_b) = leaves((5, 64), (64, 6), dtype=dtype)
    a, b = a.detach(), b.detach()
    added = torch.randn(5, 6)
    wanted = (plain_a @ plain_b).detach()
    assert_rounded(torch.mm(a, b, out_dtype=torch.float32), wanted)
    assert_rounded(torch.bmm(a[None], b[None], out_dtype=torch.float32), wanted[None])
    total = added.to(DEVICE)
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    assert_rounded(total, wanted + added)
    unread = torch.full((5, 6), torch.nan, device=DEVICE)
    assert_rounded(torch.addmm(unread, a, b, beta=0, out_dtype=torch.float32), wanted)
    with pytest.raises(RuntimeError, match="no product of"):
        torch.mm(a, b, out_dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_the_fused_rms_norm_and_its_gradients(simulator, dtype):
    (x, weight), (plain_x, plain_weight) = leaves((3, 4, 16), (16,), dtype=dtype)
    output, scale = torch.ops.aten._fused_rms_norm(x.detach(), [16], weight.detach(), 1e-6)
    grad = torch.randn(3, 4, 16).to(dtype)
    gradients = torch.ops.aten._fused_rms_norm_backward(
        grad.to(DEVICE), x.detach(), [16], scale, weight.detach(), [True, True]
    )
    wanted = F.rms_norm(plain_x, (16,), plain_weight, 1e-6)
    wanted.backward(grad.double())
    assert scale.shape == (3, 4, 1) and scale.dtype == torch.float32
    assert_rounded(output, wanted.detach())
    assert_rounded(gradients[0], plain_x.grad)
    assert_rounded(gradients[1], plain_weight.grad)

"""RMS norm and gated product: values and gradients against torch's own, and what they keep for the backward."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.rounding import assert_close_in_sums
from torchround.models.common.primitives import RMSNorm, gated_product


def real_norm(size, dtype=torch.float32):
    norm = RMSNorm(size, eps=1e-5)
    norm.weight = torch.nn.Parameter(torch.linspace(0.5, 2.0, size).to(dtype))
    return norm


def saved_bytes(run):
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    del kept
    return sum(storages.values())


def test_norm_and_its_gradients_equal_torchs():
    norm, x = real_norm(33), (3 * torch.randn(2, 5, 33)).requires_grad_()
    upstream = torch.randn(2, 5, 33)
    norm(x).backward(upstream)
    found = (x.grad, norm.weight.grad)
    wide_x, wide_weight = (tensor.detach().double().requires_grad_() for tensor in (x, norm.weight))
    expected = F.rms_norm(wide_x, (33,), wide_weight, 1e-5)
    expected.backward(upstream.double())
    # Sums over 33 channels, and over 10 tokens for the weight; twice that in the backward.
    assert_close_in_sums(norm(x).double(), expected, 43)
    for one, other in zip(found, (wide_x.grad, wide_weight.grad), strict=True):
        assert_close_in_sums(one.double(), other, 86)


def test_bf16_norm_rounds_only_its_result():
    norm, x = real_norm(64, torch.bfloat16), (100 * torch.randn(7, 64)).bfloat16()
    exact = F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-5)
    assert torch.equal(norm(x), exact.bfloat16()) or (norm(x) - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_norm_keeps_its_input_and_one_number_per_token():
    norm, x = real_norm(64, torch.bfloat16), torch.randn(2, 9, 64, dtype=torch.bfloat16, requires_grad=True)
    weight_bytes = 2 * 64
    assert saved_bytes(lambda: norm(x)) == 2 * x.numel() + 4 * 18 + weight_bytes


# No sums: five roundings of 2^-8 each in bf16, and sixteen of 2^-24 in fp32: the exponential takes some.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_swiglu_and_its_gradients_equal_silu_times_up(dtype, tolerance):
    gate, up, upstream = (torch.randn(4, 17).to(dtype) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    product = gated_product(gate, up)
    product.backward(upstream)
    wide_gate, wide_up = (tensor.detach().double().requires_grad_() for tensor in (gate, up))
    expected = F.silu(wide_gate) * wide_up
    expected.backward(upstream.double())
    for one, other in ((product, expected), (gate.grad, wide_gate.grad), (up.grad, wide_up.grad)):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_swiglu_keeps_its_two_inputs_only():
    gate, up = (torch.randn(4, 16, requires_grad=True) for _ in range(2))
    assert saved_bytes(lambda: gated_product(gate, up)) == 4 * (gate.numel() + up.numel())

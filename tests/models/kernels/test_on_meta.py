"""What experts and the head run on cards of each generation, counted on `meta`."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_counts import CountingMode
from torchround.accelerators import CudaKind, as_if_on
from torchround.models import FAMILIES
from torchround.models.common import loss

BEFORE_HOPPER, HOPPER, GEFORCE_BLACKWELL = (8, 9), (9, 0), (12, 0)


class Names(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def experts_operations(family, flavor, capability, has_sums):
    """Operations of the forward and backward of one block's experts on a card of this capability."""
    config = FAMILIES[family].config_from_flavor(flavor, num_layers=1)
    moe = FAMILIES[family].build(config).layers[1].mlp.bfloat16()
    for parameter in moe.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.empty(parameter.shape, device="meta") if has_sums else None
    x = torch.empty(2, 16, config.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with as_if_on(CudaKind(capability)), Names() as names:
        moe(x).backward(torch.empty_like(x))
    return names.seen


@pytest.mark.parametrize(
    ("family", "flavor", "products", "has_sums", "capability"),
    [("qwen3", "debug_moe", 3, True, BEFORE_HOPPER), ("gpt_oss", "debug", 2, False, GEFORCE_BLACKWELL)],
)
def test_cards_without_pytorchs_kernel_run_triton_and_never_wait(family, flavor, products, has_sums, capability):
    seen = experts_operations(family, flavor, capability, has_sums)
    assert seen.count("torchround::grouped_rows") == 2 * products
    assert seen.count("torchround::grouped_gradient_") == products
    assert "aten::_grouped_mm" not in seen and "aten::_local_scalar_dense" not in seen


@pytest.mark.parametrize(("has_sums", "theirs", "ours"), [(True, 6, 3), (False, 9, 0)])
def test_hopper_runs_pytorchs_kernel_and_adds_to_sums_with_triton(has_sums, theirs, ours):
    seen = experts_operations("qwen3", "debug_moe", HOPPER, has_sums)
    assert seen.count("aten::_grouped_mm") == theirs
    assert seen.count("torchround::grouped_gradient_") == ours and "torchround::grouped_rows" not in seen


VOCAB, WIDTH, TOKENS = 151936, 2048, 8192  # Qwen3-1.7B, a micro-batch of four sequences


def test_the_head_moves_at_most_25_gb_in_all():
    """On `meta`, as on a card, with the weight's gradient where the engine has it."""
    hidden = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(VOCAB, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight.grad_dtype = torch.float32
    weight.grad = torch.empty(VOCAB, WIDTH, device="meta")
    labels = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    with as_if_on("cuda"), CountingMode() as mode:
        total = loss.token_loss_sum(hidden, weight, labels, 0.1)
        total.backward(torch.empty_like(total))
    assert mode.counted.elementwise_bytes + mode.counted.product_bytes < 25e9
    assert "mul_" not in mode.counted.by_name(), "no pass multiplies finished gradients"

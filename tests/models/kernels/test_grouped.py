"""What experts run on cards of each generation."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.accelerators import CudaKind, as_if_on
from torchround.models import FAMILIES

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

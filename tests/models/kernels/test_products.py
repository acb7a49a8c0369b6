"""What runs on cards of each generation, counted on `meta`, and products that add to a weight's fp32 gradient."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels import CountingMode
from tests.support.interpreted import random
from tests.support.rounding import BF16, FP32, assert_close_in_sums
from torchround.accelerators import CudaKind, as_if_on
from torchround.models import FAMILIES
from torchround.models.common import loss
from torchround.models.kernels import projections
from torchround.models.kernels.projections import Projection, project, project_all

BEFORE_HOPPER, HOPPER, GEFORCE_BLACKWELL = (8, 9), (9, 0), (12, 0)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def experts_operations(family, flavor, capability, has_sums):
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


VOCAB, WIDTH, POSITIONS = 151936, 2048, 8192  # Qwen3-1.7B, a micro-batch of four sequences


def test_the_head_moves_at_most_25_gb_in_all():
    """On `meta`, as on a card, with the weight's gradient where the engine has it."""
    hidden = torch.empty(POSITIONS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(VOCAB, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight.grad_dtype = torch.float32
    weight.grad = torch.empty(VOCAB, WIDTH, device="meta")
    labels = torch.empty(POSITIONS, dtype=torch.int64, device="meta")
    with as_if_on("cuda"), CountingMode() as mode:
        total = loss.token_loss_sum(hidden, weight, labels, 0.1)
        total.backward(torch.empty_like(total))
    assert mode.counted.num_bytes < 25e9
    assert "mul_" not in {operation.name for operation in mode.counted.operations}, (
        "no pass multiplies finished gradients"
    )


BATCH, TOKENS, INPUTS, OUTPUTS = 2, 6, 5, 7


@pytest.fixture
def products(monkeypatch):
    totals = []

    def add(total, left, right):
        assert left.dtype == right.dtype == torch.bfloat16 and total.dtype == torch.float32
        totals.append(total)
        total += left.float() @ right.float()

    stand_ins = {"has_float32_products": lambda device, dtype: dtype != torch.float16, "add_product_": add}
    for name, function in stand_ins.items():
        monkeypatch.setattr(projections, name, function)
    return totals


def leaf(shape, dtype=torch.bfloat16, grad=True):
    weight = torch.nn.Parameter(random(*shape, dtype=dtype))
    if grad:
        weight.grad_dtype = torch.float32
        weight.grad = torch.zeros(shape)
    return weight


def micro_batch(number):
    return random(BATCH, TOKENS, INPUTS, dtype=torch.bfloat16, seed=number).requires_grad_()


def test_gradients_of_several_micro_batches_are_added_up_without_rounding_them_to_16_bits(products):
    weight, bias = leaf((OUTPUTS, INPUTS)), leaf((OUTPUTS,))
    sums, exact = weight.grad, torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    exact_bias = torch.zeros(OUTPUTS, dtype=torch.float64)
    for number in range(3):
        x, upstream = micro_batch(number), random(BATCH, TOKENS, OUTPUTS, dtype=torch.bfloat16, seed=9)
        result = project(x, weight, bias)
        assert torch.equal(result, F.linear(x, weight, bias))
        result.backward(upstream)
        assert torch.equal(x.grad, upstream @ weight)
        exact += upstream.double().flatten(0, 1).T @ x.detach().double().flatten(0, 1)
        exact_bias += upstream.double().sum(dim=(0, 1))
    assert weight.grad is sums and all(total.data_ptr() == sums.data_ptr() for total in products)
    assert len(products) == 3
    terms = 3 * BATCH * TOKENS
    # A gradient that is rounded to bf16 on its way differs 2^16 times as much.
    assert_close_in_sums(sums.double(), exact, terms, unit=FP32, scale=20.0)
    assert_close_in_sums(bias.grad.double(), exact_bias, terms, unit=FP32, scale=20.0)


def test_the_leaf_that_was_bound_in_the_forward_gets_the_gradient(products):
    """The engine binds another slot's leaves to the module before the backward of an earlier forward may run."""
    layer = Projection(INPUTS, OUTPUTS)
    layer.weight = first = leaf((OUTPUTS, INPUTS))
    result = layer(micro_batch(0))
    layer.weight = second = leaf((OUTPUTS, INPUTS))
    result.sum().backward()
    assert first.grad.any() and not second.grad.any()


@pytest.mark.parametrize("case", ["no sum", "fp32 weight", "frozen", "no gradients", "no such product"])
def test_every_other_weight_is_left_to_autograd(case, products):
    dtypes = {"fp32 weight": torch.float32, "no such product": torch.float16}
    weight = leaf((OUTPUTS, INPUTS), dtypes.get(case, torch.bfloat16), case != "no sum")
    weight.requires_grad_(case != "frozen")
    x = micro_batch(0).detach().to(weight.dtype).requires_grad_()
    with torch.set_grad_enabled(case != "no gradients"):
        result = project(x, weight)
    assert torch.equal(result, F.linear(x, weight))
    if case != "no gradients":
        result.sum().backward()
        assert (weight.grad is None or not weight.grad.any()) == (case == "frozen")
    assert products == []


def test_a_gradient_that_is_gone_by_the_backward_is_made_by_autograd(products):
    weight = leaf((OUTPUTS, INPUTS))
    result = project(micro_batch(0), weight)
    weight.grad = None
    result.sum().backward()
    assert weight.grad.any() and products == []


@pytest.mark.parametrize("wants", ["everything", "no input", "one weight frozen"])
def test_projections_of_one_input_give_the_gradients_of_separate_ones(wants, products, fused):
    layers = [Projection(INPUTS, OUTPUTS, bias=True), Projection(INPUTS, 3)]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            setattr(layer, name, leaf(parameter.shape))
    layers[0].weight.requires_grad_(wants != "one weight frozen")
    x = micro_batch(0).requires_grad_(wants != "no input")
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, *layers[0].parameters(), layers[1].weight)]
    upstream = [random(BATCH, TOKENS, size, dtype=torch.bfloat16) for size in (OUTPUTS, 3)]
    results = project_all(x, layers)
    assert all(
        torch.equal(one, F.linear(x, layer.weight, layer.bias)) for one, layer in zip(results, layers, strict=True)
    )
    torch.autograd.backward(results, upstream)
    expected = torch.autograd.grad(
        (F.linear(exact[0], *exact[1:3]), F.linear(exact[0], exact[3])), exact, [one.double() for one in upstream]
    )
    if wants == "no input":
        assert x.grad is None
    else:
        # Each of the two products rounds its result to bf16.
        assert_close_in_sums(x.grad.double(), expected[0], 2, unit=BF16)
    assert len(products) == (1 if wants == "one weight frozen" else 2)
    if wants != "one weight frozen":
        assert_close_in_sums(layers[0].weight.grad.double(), expected[1], BATCH * TOKENS, scale=20.0)
    assert_close_in_sums(layers[0].bias.grad.double(), expected[2], BATCH * TOKENS, scale=20.0)
    assert_close_in_sums(layers[1].weight.grad.double(), expected[3], BATCH * TOKENS, scale=20.0)

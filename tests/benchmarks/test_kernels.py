"""Counted launches, bytes and FLOPs are those of operations whose costs are known, and predictions follow from them."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernel_counts import Counted, CountingMode, Operation, count_layers
from benchmarks.kernels import CARDS, CardRates, counted_model, missed_goals
from torchround.accelerators import CudaKind
from torchround.layer import MicroBatch
from torchround.models import FAMILIES, OWN_FAMILIES


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(function: object, *tensors: Tensor) -> Counted:
    with CountingMode() as mode:
        function(*tensors)  # type: ignore[operator]
    return mode.counted


@pytest.mark.parametrize(
    ("function", "tensors", "num_bytes"),
    [
        pytest.param(lambda a, b: a + b, (meta(64), meta(64)), 3 * 128, id="out of place"),
        pytest.param(lambda a, b: a.add_(b), (meta(64), meta(64)), 3 * 128, id="in place: read and written"),
        pytest.param(lambda a: a * a, (meta(64),), 2 * 128, id="the same tensor twice is read once"),
        pytest.param(lambda a: a.zero_(), (meta(64),), 128, id="overwritten, not read"),
        pytest.param(lambda a: torch.zeros_like(a), (meta(64),), 128, id="taken for its shape"),
        pytest.param(lambda a: a.float(), (meta(64),), 128 + 256, id="a cast"),
        pytest.param(lambda a, b: a.copy_(b), (meta(64, dtype=torch.float32), meta(64)), 256 + 128, id="a copy"),
        pytest.param(lambda a, b: a * b, (meta(8, 64), meta(8, 1).expand(8, 64)), 2 * 1024 + 16, id="broadcast"),
        pytest.param(lambda a, b: a[b], (meta(1000, 64), meta(4, dtype=torch.int64)), 2 * 512 + 32, id="rows"),
        pytest.param(
            lambda a, b, out: torch.add(a, b, out=out), (meta(64), meta(64), meta(64)), 3 * 128, id="out argument"
        ),
    ],
)
def test_an_operation_moves_what_it_reads_and_writes(
    function: object, tensors: tuple[Tensor, ...], num_bytes: int
) -> None:
    found = counted(function, *tensors)
    assert (found.launches, found.elementwise_bytes) == (1, num_bytes)


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.view(8, 8).transpose(0, 1)[2:].unsqueeze(0).expand(3, -1, -1),
        lambda a: torch.empty_like(a).detach(),
        lambda a: a[2:].copy_(a[2:]),  # the assignment that ends `a[2:] += b`
    ],
)
def test_views_empty_tensors_and_copies_onto_themselves_cost_nothing(function: object) -> None:
    assert counted(function, meta(64)).launches == 0


def test_products_count_two_flops_for_each_multiply_add() -> None:
    rows, ends = meta(96, 32), meta(4, dtype=torch.int32)
    assert counted(torch.mm, meta(8, 32), meta(32, 16)).product_flops == 2 * 8 * 32 * 16
    assert counted(torch.addmm, meta(8, 16), meta(8, 32), meta(32, 16)).product_flops == 2 * 8 * 32 * 16
    grouped = counted(lambda a, b: F.grouped_mm(a, b, offs=ends), rows, meta(4, 32, 16))
    assert grouped.product_flops == 2 * 96 * 32 * 16
    matrices = counted(lambda a, b: F.grouped_mm(a, b, offs=ends), rows.T, meta(96, 16))
    assert matrices.product_flops == 2 * 96 * 32 * 16
    ours = counted(lambda a, b: torch.ops.torchround.grouped_rows(a, b, ends), rows, meta(4, 32, 16))
    assert ours.product_flops == 2 * 96 * 32 * 16
    add = torch.ops.torchround.grouped_gradient_
    added = counted(lambda a, b, total: add(a, b, ends, total), rows, meta(96, 16), meta(4, 32, 16))
    assert added.product_flops == 2 * 96 * 32 * 16


def test_an_operation_of_ours_is_one_launch_that_moves_its_arguments_and_results() -> None:
    with torch.library._scoped_library("torchround", "FRAGMENT") as library:
        library.define("counted_as_one(Tensor a, Tensor(b!) total) -> Tensor")
        library.impl("counted_as_one", lambda a, total: a.exp().log(), "Meta")
        found = counted(torch.ops.torchround.counted_as_one, meta(64), meta(8, dtype=torch.float32))
    assert [operation.name for operation in found.operations] == ["torchround::counted_as_one"]
    assert found.elementwise_bytes == 2 * 128 + 2 * 32


@pytest.mark.parametrize("window", [None, 16])
def test_attention_counts_the_causal_pairs_inside_the_window(window: int | None) -> None:
    batch, tokens, heads, channels = 2, 512, 4, 32  # long enough for one call of the kernel in backward
    config = FAMILIES["gpt_oss"].config_from_flavor(
        "debug", num_heads=heads, head_dim=channels, window=window or tokens
    )
    model = FAMILIES["gpt_oss"].build(config)
    integers = meta(batch, tokens, dtype=torch.int64)
    micro_batch = MicroBatch(integers, integers, integers, integers, max_documents=3)
    block = count_layers(model, micro_batch, torch.bfloat16, CudaKind((9, 0)))[1]
    pairs = sum(min(position + 1, window or tokens) for position in range(tokens))
    assert block.forward.attention_flops == 4 * batch * pairs * heads * channels
    assert block.backward.attention_flops == 2.5 * block.forward.attention_flops


@pytest.mark.parametrize("family", sorted(OWN_FAMILIES))
def test_products_of_a_model_are_those_that_its_layers_declare(family: str) -> None:
    """Compare with `work`, which counts from shapes alone and takes attention over all pairs."""
    model = FAMILIES[family].build(FAMILIES[family].config_from_flavor("debug"))
    integers = meta(2, 64, dtype=torch.int64)
    layers = count_layers(
        model, MicroBatch(integers, integers, integers, integers, max_documents=3), torch.bfloat16, CudaKind((9, 0))
    )
    for name, layer, module in zip(model.names, layers, model.layers, strict=True):
        work = module.work(2, 64, 2)
        attention = getattr(module, "attention", None)
        pairs = 0.0 if attention is None else 4.0 * 2 * 64 * 64 * attention.num_heads * attention.head_dim
        products = layer.forward.product_flops + layer.backward.product_flops
        assert products == work.forward_flops + work.backward_flops - 3 * pairs, name


def test_a_time_is_bound_by_bytes_or_by_flops_of_each_operation() -> None:
    card = CardRates("slow", (9, 0), bytes=10.0, product_flops=100.0, attention_flops=50.0, peak_flops=200.0)
    operations = [Operation("add", 20), Operation("mm", 10, product_flops=300.0), Operation("mm", 50, 100.0)]
    assert card.seconds(Counted(operations)) == pytest.approx(2.0 + 3.0 + 5.0)


def test_blocks_and_head_stay_within_their_launches_and_bytes_and_the_predicted_mfu_above_its_bound() -> None:
    """Before fused operations: 84 and 121 launches, 4.3 and 9.4 GB, a head of 242 GB, an MFU of 0.34 and 0.55."""
    figures = {"models": [counted_model(name, 4, 2048, 8) for name in ("qwen3:1.7B", "qwen3:4B")]}
    assert missed_goals(figures) == []


def test_a_missed_goal_is_named_with_its_figure() -> None:
    figures = {"models": [counted_model("qwen3:1.7B", 16, 2048, 8)]}  # four times the tokens: it must miss the bytes
    assert any(
        line.startswith("qwen3:1.7B block: ") and "GB of a forward, goal 1.6" in line for line in missed_goals(figures)
    )


def test_the_predicted_mfu_is_customary_flops_over_time_and_peak() -> None:
    found = counted_model("llama3:debug", 2, 64, 3)
    for guess, card in zip(found["predicted"], CARDS, strict=True):
        seconds = 1e-3 * guess["micro_batch_ms"]
        assert guess["mfu"] == pytest.approx(found["customary_flops"] / seconds / card.peak_flops)
        assert guess["recomputed_micro_batch_ms"] > guess["micro_batch_ms"]

"""Costs as data, from FLOPs, and against the published layer times and hops."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given

from tests.support.random_costs import costs
from torchround.layer import KeptWork
from torchround.models import FAMILIES
from torchround.pipeline.cards import ASSUMED_DEVICE, DEVICES, DeviceSpec, find_device
from torchround.pipeline.costs import (
    COMPUTE_EFFICIENCY,
    Costs,
    CostsError,
    KeptCost,
    LayerCost,
    ParameterCounts,
    costs_from_work,
    hop_seconds,
    stage_seconds,
)
from torchround.pipeline.partition import Stage, StageKind
from torchround.pipeline.update_costs import JobWork, newton_schulz_flops

# RoundPipe's artifact: forward of a block and hop, both in ms, for micro-batches of 4 x 2048 tokens.
PUBLISHED = {
    "qwen3/1.7B": (7.429, 1.6),
    "llama3/3.1-8B": (18.5037, 3.2),
    "gpt_oss/20B": (21.6446, 2.25),
    "qwen3/32B": (40.5611, 4.0),
    "qwen3/235B-A22B": (43.016, 3.2),
}


@dataclass(frozen=True)
class Work:
    forward_flops: float
    activation_bytes: int = 0
    boundary_bytes: int = 0
    workspace_bytes: int = 0
    backward_flops: float = 0.0
    keepable: tuple[KeptWork, ...] = ()


@given(costs())
def test_costs_survive_json(costs):
    assert Costs.from_json(costs.to_json()) == costs


def test_bytes_and_names_may_be_left_out_of_a_file():
    text = '{"hop_s": 0.5, "layers": [{"forward_s": 1, "backward_s": 2}, {"name": "head", "forward_s": 1, "backward_s": 2}]}'
    read = Costs.from_json(text)
    assert read == Costs((LayerCost("layer.0", 1, 2), LayerCost("head", 1, 2)), 0.5)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"forward_s": 1}, "lacks.*backward_s"),
        ({"forward_s": -1, "backward_s": 2}, "forward_s = -1"),
        ({"forward_s": "1", "backward_s": 2}, "'1' is not a number"),
        ({"forward_s": float("nan"), "backward_s": 2}, "finite"),
        ({"forward_s": 1, "backward_s": 2, "backwards_s": 2}, "backwards_s"),
        ({"forward_s": 1, "backward_s": 2, "keepable": [{"name": "down"}]}, "keepable"),
        ({"forward_s": 1, "backward_s": 2, "keepable": [{"name": "down", "nbytes": -1, "seconds": 1}]}, "nbytes = -1"),
        ({"forward_s": 1, "backward_s": 2, "kept": ["down"]}, "cannot keep"),
        ({"forward_s": 1, "backward_s": 2, "kept": "down"}, "kept = 'down'"),
        (3, "not an object"),
    ],
)
def test_a_wrong_layer_is_named_with_what_is_wrong(layer, message):
    with pytest.raises(CostsError, match=message):
        Costs.from_json(json.dumps({"layers": [layer]}))


def test_a_file_that_holds_no_costs_is_refused():
    for text in ("", "[]", "{}", '{"layers": []}', '{"layers": 3}', '{"hop_s": "a", "layers": [{}]}'):
        with pytest.raises(CostsError):
            Costs.from_json(text)


def test_a_stage_costs_its_layers_and_recomputes_where_it_must():
    costs = Costs((LayerCost("a", 1.0, 2.0), LayerCost("b", 3.0, 5.0), LayerCost("c", 7.0, 11.0)))
    assert stage_seconds(costs, Stage(StageKind.FORWARD, 0, 2)) == (0.0, 4.0)
    assert stage_seconds(costs, Stage(StageKind.FUSED, 1, 3)) == (0.0, 3 + 7 + 5 + 11)
    assert stage_seconds(costs, Stage(StageKind.BACKWARD, 0, 2)) == (4.0, 7.0)
    # One layer's activations at a time: all but the last layer are computed once more.
    assert stage_seconds(costs, Stage(StageKind.BACKWARD, 0, 2), "layer") == (4.0, 7.0 + 1.0)
    assert stage_seconds(costs, Stage(StageKind.FUSED, 1, 3), "layer") == (0.0, 26.0 + 3.0)


def test_seconds_are_flops_over_what_a_card_reaches_and_frozen_parameters_have_no_update():
    flops = COMPUTE_EFFICIENCY * 1e12
    works = [Work(flops, backward_flops=2 * flops), Work(flops, backward_flops=flops), Work(0.0)]
    sizes = [ParameterCounts(100), ParameterCounts(0, 100), ParameterCounts(0)]
    costs = costs_from_work(
        ["full", "frozen", "none"], works, sizes, ASSUMED_DEVICE, optimizer_bytes_per_s=2800, update_bytes=[2800, 0, 0]
    )
    full, frozen, none = costs.layers
    assert full.forward_s == pytest.approx(1.0) and full.backward_s == pytest.approx(2.0)
    assert frozen.backward_s == pytest.approx(frozen.forward_s)
    assert (full.weight_bytes, full.gradient_bytes, full.optimizer_s) == (200, 400, pytest.approx(1.0))
    assert (frozen.gradient_bytes, frozen.optimizer_s, none.forward_s) == (0, 0.0, 0.0)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_hop_and_a_block_take_what_was_measured(model):
    """The published runs accumulated in fp16. Large dense blocks reached 0.64 of that peak, small ones and experts less."""
    (name, flavor), card = model.split("/"), find_device("rtx4090")
    family = FAMILIES[name]
    work = family.build(family.config_from_flavor(flavor)).layers[1].work(4, 2048, 2)
    measured_ms, hop_ms = PUBLISHED[model]
    assert hop_seconds(work.boundary_bytes, card) == pytest.approx(hop_ms / 1e3, rel=0.02)
    [block] = costs_from_work(["block"], [work], [ParameterCounts(1)], card, "float16", fp16_accumulation=True).layers
    if model in ("llama3/3.1-8B", "qwen3/32B"):
        assert 1e3 * block.forward_s == pytest.approx(measured_ms, rel=0.1)
        # So these times may not calibrate the counted costs of runs that accumulate in fp32: no card is so fast.
        reached = work.forward_flops / (measured_ms / 1e3)
        assert card.flops_per_s("float16") < reached < card.flops_per_s("float16", fp16_accumulation=True)
    else:
        assert 1 / 2.1 < 1e3 * block.forward_s / measured_ms < 1.0


def test_fp16_accumulation_doubles_the_rate_of_float16_on_geforce_cards_alone():
    for device in DEVICES:
        ratio = device.flops_per_s("float16", fp16_accumulation=True) / device.flops_per_s("float16")
        consumer = device.name.startswith("rtx") and device.name not in ("rtxa6000", "rtx6000ada")
        assert ratio == (2.0 if consumer else 1.0), device.name
        assert device.known_flops_per_s("bfloat16", True) == device.known_flops_per_s("bfloat16")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100pcie"),
        # A wrong peak would give a wrong MFU, so a card that is not certain is not found.
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("H100 NVL", None),
        ("", None),
    ],
)
def test_a_card_is_found_under_its_own_name_and_under_pytorchs(reported, name):
    device = find_device(reported)
    assert name == (device and device.name)


KEEPING = LayerCost("block", 4.0, 8.0, keepable=(KeptCost("attention", 10, 1.0), KeptCost("down", 20, 2.0)))


def test_a_backward_stage_skips_what_its_layers_keep_and_no_other_stage_does():
    costs = Costs((KEEPING, KEEPING, LayerCost("head", 5.0, 11.0))).keeping([("down",), ("attention", "down"), ()])
    assert [layer.kept_bytes for layer in costs.layers] == [20, 30, 0]
    assert stage_seconds(costs, Stage(StageKind.FORWARD, 0, 2)) == (0.0, 8.0)
    assert stage_seconds(costs, Stage(StageKind.FUSED, 1, 3)) == (0.0, 4 + 8 + 5 + 11)
    assert stage_seconds(costs, Stage(StageKind.BACKWARD, 0, 2)) == (2.0 + 1.0, 16.0)
    # The second recomputation of the first layer skips the same parts.
    assert stage_seconds(costs, Stage(StageKind.BACKWARD, 0, 2), "layer") == (3.0, 16.0 + 2.0)
    assert stage_seconds(costs, Stage(StageKind.FUSED, 0, 3), "layer") == (0.0, 13 + 27 + 8.0)


def test_measured_seconds_scale_the_parts_of_a_layer():
    timed = KEEPING.timed(6.0, 9.0)
    assert (timed.forward_s, timed.backward_s) == (6.0, 9.0)
    assert [(part.nbytes, part.seconds) for part in timed.keepable] == [(10, 1.5), (20, 3.0)]


def test_kept_names_that_a_layer_lacks_are_refused():
    for kept, message in (([("down",)], "1 layers"), ([("qkv",), ()], "qkv"), ([(), ("down",)], "head")):
        with pytest.raises(CostsError, match=message):
            Costs((KEEPING, LayerCost("head", 1.0, 1.0))).keeping(kept)


def test_a_job_of_an_update_costs_its_products_and_one_copy_each_way():
    """Five steps on a 2 x 3 matrix and on a stack of four 5 x 2 ones, by hand: m^2 n and m^3 of the shorter side m."""
    assert newton_schulz_flops((2, 3), 5) == newton_schulz_flops((3, 2), 5) == 5 * (4 * 4 * 3 + 2 * 8)
    assert newton_schulz_flops((4, 5, 2), 5) == 4 * 5 * (4 * 4 * 5 + 2 * 8)
    # With 1024 rows in two bands, three of four quarters of `X X^T` and of its square are computed.
    m, n = 1024, 2048
    assert newton_schulz_flops((n, m), 5) == 5 * (0.75 * 2 * m * m * n + 0.75 * 2 * m**3 + 2 * m * m * n)
    card = DeviceSpec("card", 24, 10, {"bfloat16": 1e12, "float16": 2e12})
    job = JobWork(6e11, 6_600_000_000, 40, 50) + JobWork(6e11, 0, 60, 10)
    layer, other = costs_from_work(
        ["block", "head"], [Work(1.0), Work(1.0)], [ParameterCounts(1)] * 2, card, "float16", jobs=[job, JobWork()]
    ).layers
    assert layer.job_s == pytest.approx(2.0) and layer.job_link_s == pytest.approx(1.0)
    assert (layer.job_slot_bytes, layer.job_scratch_bytes) == (60, 50)
    assert (other.job_s, other.job_link_s, other.job_slot_bytes) == (0, 0, 0)

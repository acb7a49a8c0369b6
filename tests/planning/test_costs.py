"""Costs as data, from FLOPs, and against the published layer times and hops."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from scripts import fit_rates
from tests.support.random_costs import costs
from torchround.layer import KeptWork, LayerWork, Products
from torchround.planning.cards import ASSUMED_DEVICE, DEVICES, DeviceSpec, find_device
from torchround.planning.costs import Costs, CostsError, KeptCost, LayerCost
from torchround.planning.rates import RATES, CardRates, Rates, costs_from_work
from torchround.planning.update_costs import newton_schulz_flops
from torchround.run.numbers import with_job

KEEPING = LayerCost("block", 4.0, 8.0, keepable=(KeptCost("attention", 10, 1.0), KeptCost("down", 20, 2.0)))


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
        ({"forward_s": 1}, "backward_s: Field required"),
        ({"forward_s": -1, "backward_s": 2}, "forward_s: .*greater than or equal to 0"),
        ({"forward_s": "1", "backward_s": 2}, "valid number, given '1'"),
        ({"forward_s": float("nan"), "backward_s": 2}, "finite"),
        ({"forward_s": 1, "backward_s": 2, "backwards_s": 2}, "backwards_s"),
        ({"forward_s": 1, "backward_s": 2, "keepable": [{"name": "down"}]}, "keepable"),
        (
            {"forward_s": 1, "backward_s": 2, "keepable": [{"name": "down", "nbytes": -1, "seconds": 1}]},
            "keepable.0.nbytes: .*greater than",
        ),
        ({"forward_s": 1, "backward_s": 2, "kept": ["down"]}, "cannot keep"),
        ({"forward_s": 1, "backward_s": 2, "kept": "down"}, "kept: .* given 'down'"),
        (3, "be an object, given 3"),
    ],
)
def test_a_wrong_layer_is_named_with_what_is_wrong(layer, message):
    with pytest.raises(CostsError, match=message):
        Costs.from_json(json.dumps({"layers": [layer]}))


def test_a_file_that_holds_no_costs_is_refused():
    for text in ("", "[]", "{}", '{"layers": []}', '{"layers": 3}', '{"hop_s": "a", "layers": [{}]}'):
        with pytest.raises(CostsError):
            Costs.from_json(text)


def test_seconds_are_those_of_each_kind_of_work_and_frozen_parameters_have_no_update():
    card = DeviceSpec("card", 24, 10, {"bfloat16": 1e12}, memory_gb_per_s=1.0)
    rates = Rates(dense=0.5, grouped=0.25, head=0.1, passes=3.0, update_bytes_per_s=2800)
    kept = KeptWork("down", 7, 1e12, 0, "grouped")
    works = [
        LayerWork((Products(1e12), Products(1e12, 1e12, "grouped")), 10**9, keepable=(kept,)),
        LayerWork((Products(1e12, 0.0, "head"),), 10**9),  # what it moves is in its rate
        LayerWork(),
    ]
    numels, at_rates = [(10**8, 0), (0, 100), (5, 0)], CardRates.of(card, "bfloat16", rates=rates)
    layers = costs_from_work(list("abc"), works, numels, at_rates, update_bytes=[2800, 0, 0]).layers
    seconds = [(layer.forward_s, layer.backward_s, layer.optimizer_s) for layer in layers]
    # A backward moves the activations twice, and gradients of 4 bytes.
    assert seconds == [pytest.approx((2 + 4 + 3 * 1, 2 * 2 + 4 + 3 * 2.4, 1)), pytest.approx((10, 20, 0)), (0, 0, 0)]
    assert [layers[0].keepable, layers[0].timed(18.0, 1.0).keepable] == [(KeptCost("down", 7, s),) for s in (4.0, 8.0)]
    assert (layers[0].weight_bytes, layers[0].gradient_bytes) == (2 * 10**8, 4 * 10**8)
    assumed = CardRates.of(ASSUMED_DEVICE, "bfloat16")
    assert costs_from_work(["block"], works[:1], numels[:1], assumed).layers[0].forward_s > 3


@pytest.mark.parametrize("packed_bytes", [10**9, 0])
@pytest.mark.parametrize("kept", [(), ("attention",), ("attention", "down")], ids=str)
def test_a_layer_is_unpacked_before_each_forward_recomputation_and_backward(kept, packed_bytes):
    """What the layer keeps saves nothing of it."""
    layer, card = replace(KEEPING, kept=kept, weight_bytes=packed_bytes), DeviceSpec("card", 24, 10, {"bfloat16": 1e12})
    pass_s = 5 * packed_bytes / card.memory_bytes_per_s(1e12)  # 1 byte is read, 4 are written
    packed = CardRates.of(card, "bfloat16").unpacking(layer, 4 * packed_bytes, 100)
    seconds = [layer.forward_s + pass_s, layer.recompute_s + pass_s, layer.backward_s + pass_s]
    assert [packed.forward_s, packed.recompute_s, packed.backward_s] == pytest.approx(seconds)
    assert packed.keepable == layer.keepable
    assert (packed.unpacked_bytes, packed.workspace_bytes) == (4 * packed_bytes, 100 * bool(packed_bytes))


def test_published_steps_are_predicted_without_the_model_and_hops_are_as_measured():
    for width, hop_ms in (
        (2048, 1.6),
        (4096, 3.2),
        (2880, 2.25),
        (5120, 4.0),
    ):  # of 4 x 2048 tokens, RoundPipe's artifact
        assert find_device("rtx4090").hop_s(4 * 2048 * width * 2) == pytest.approx(hop_ms / 1e3, rel=0.02)
    assert fit_rates.main(["--check"]) == 0


def test_fp16_accumulation_doubles_the_rate_of_float16_on_geforce_cards_alone():
    for device in DEVICES:
        ratio = device.flops_per_s("float16", fp16_accumulation=True) / device.flops_per_s("float16")
        consumer = device.name.startswith("rtx") and device.name not in ("rtxa6000", "rtx6000ada")
        assert ratio == (2.0 if consumer else 1.0), device.name
        assert device.flops_per_s("bfloat16", True) == device.flops_per_s("bfloat16")


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
    small, large = (2, 3), (4, 2000, 1000)
    layer = with_job(LayerCost("block", 1.0, 2.0), [small, large], card, "float16")
    assert layer.job_s == pytest.approx((240 + newton_schulz_flops(large, 5)) / 1e12 / RATES.dense)
    assert layer.job_link_s == pytest.approx(2 * (6 + 8e6) / 6.6e9)
    # The two share memory: two slots of bf16, then three results and two squares of the shorter side for each matrix.
    assert (layer.job_slot_bytes, layer.job_scratch_bytes) == (2 * 2 * 8_000_000, 2 * (3 * 8_000_000 + 2 * 4 * 10**6))
    assert with_job(layer, [], card, "float16") is layer

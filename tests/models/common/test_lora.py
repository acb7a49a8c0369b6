"""Fresh adapters, their names, frozen weights and dropout. `tests/hf/test_peft.py` compares losses and gradients."""

import pytest
import torch

from tests.support.rounding import assert_close_in_sums
from tests.support.toy import toy_engine, toy_store, train
from torchround.models import FAMILIES, LoraShape, ModelConfigError, add_adapters
from torchround.models.common import lora
from torchround.models.common.lora import adapter_names, mask_seed
from torchround.planning.partition import Partition

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def build(name, flavor, targets, dropout=0.0, settings=(), **fields):
    family = FAMILIES[name]
    config = family.config_from_flavor(flavor, vocab_size=50, num_layers=2, **fields)
    plain, adapted = family.build(config), family.build(config)
    names = family.hf_names(config)
    add_adapters(adapted, names, LoraShape(4, 12.0, dropout, targets, **dict(settings)))
    return plain, adapted, names


def test_fresh_adapters_change_nothing_and_have_the_names_of_pefts_files():
    plain, adapted, names = build("qwen3", "debug_moe", ATTENTION + MLP)
    adapters, prefix = adapter_names(adapted, names), "base_model.model.model.layers.1."
    assert adapters.keys() == {key for key in adapted.stored_shapes() if "lora_" in key}
    assert adapters["block.1.attention.key.lora_b"] == f"{prefix}self_attn.k_proj.lora_B.weight"
    assert adapters["block.1.mlp.experts.up_lora_a"][3] == f"{prefix}mlp.experts.3.up_proj.lora_A.weight"
    with pytest.raises(ModelConfigError, match=r"no 'k'; legal: down_proj"):
        build("llama3", "debug", ("q_proj", "k"))
    stores = [toy_store(model) for model in (plain, adapted)]
    weights = stores[1].weights()
    for name, weight in stores[0].weights().items():
        assert torch.equal(weights[name], weight)
    for name, weight in weights.items():
        if name.endswith("lora_a"):
            assert weight.any() and weight.abs().max() <= weight.shape[-1] ** -0.5
        if name.endswith("lora_b"):
            assert not weight.any()


def test_frozen_weights_have_no_gradient_no_state_and_stay(tools):
    _, model, _ = build("gpt_oss", "debug", (*ATTENTION, "gate_up_proj", "down_proj"), tied_embeddings=True)
    store = toy_store(model)
    before = {key: view.clone() for key, view in store.weights().items()}
    with toy_engine(Partition((1, 2), 1, (1, 1, 1)), model=model, store=store, num_devices=2) as engine:
        batch = tools.micro_batch([[12, 20], [32]], 50)
        losses = train(engine, [[batch]] * 3, lr=2e-2)
    assert losses[-1] < losses[0]
    for key, view in store.weights().items():
        assert torch.equal(view, before[key]) == ("lora_" not in key), key
    moments = {key for key in store.named_views() if key.startswith("exp_avg")}
    assert moments and all("lora_" in key for key in moments)
    for bundle in store.bundles:
        names = {"lora_" in parameter.name for parameter in bundle.parameters}
        assert names == {bundle.trainable}
        assert (bundle.gradient is None) == (not bundle.trainable)


def test_a_mask_depends_on_the_seed_and_zeroes_its_share(tools):
    _, model, _ = build("llama3", "debug", ("q_proj", "o_proj"), dropout=0.25)
    tools.materialise(model)
    adapters = [model.layers[1].attention.query, model.layers[1].attention.output]
    x, masks = torch.ones(100, 400), []
    for seed in (1, 1, 2):
        adapters[0].seed = seed
        masks.append(adapters[0].drop(x))
    adapters[1].seed = 1
    masks.append(adapters[1].drop(x))
    assert torch.equal(masks[0], masks[1])
    for other in masks[2:]:
        assert (masks[0] != other).float().mean() > 0.3
    assert masks[0].unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (masks[0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    adapters[0].seed = None
    assert adapters[0].drop(x) is x
    assert len({mask_seed(s, p, u) for s in range(50) for p in range(50) for u in range(4)}) == 10_000


# Settings, and the rank and the scale of the query's adapter in block 1.
VARIANTS = [
    ({}, 4, 3.0),
    ({"rslora": True}, 4, 6.0),
    ({"rank_pattern": {"q_proj": 9}, "alpha_pattern": {r"1\.self_attn\.[qk]_proj": 6}, "rslora": True}, 9, 2.0),
    ({"rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 8}}, 2, 6.0),
    ({"rank_pattern": {"elf_attn.q_proj|k_proj": 8, r".*\.1\..*": 3}}, 3, 4.0),  # a name's end begins behind a dot
    ({"dora": True}, 4, 3.0),
]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])  # without and with biases
@pytest.mark.parametrize(("settings", "rank", "scale"), VARIANTS)
def test_an_adapted_layer_has_the_outputs_and_gradients_of_its_formula(
    settings, rank, scale, family, dropout, tools, monkeypatch
):
    monkeypatch.setattr(lora, "NORM_ELEMENTS", 1000)  # several pieces
    _, model, _ = build(family, "debug", ("q_proj", "k_proj"), dropout, settings)
    layer = tools.materialise(model).layers[2].attention.query
    layer.seed = 5
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.1, generator=generator)
    x = torch.randn(2, 7, layer.in_features, generator=generator, requires_grad=True)
    a, b, dropped = layer.lora_a, layer.lora_b, layer.drop(x)
    assert a.shape[0] == rank and layer.lora.scale == scale
    expected = x @ layer.weight.T + scale * dropped @ a.T @ b.T
    if settings.get("dora"):
        turned = layer.weight + scale * b @ a
        growth = (layer.lora_magnitude + layer.weight.norm(dim=1)) / turned.detach().norm(dim=1)
        expected = x @ layer.weight.T - dropped @ layer.weight.T + growth * (dropped @ turned.T)
    expected = expected if layer.bias is None else expected + layer.bias
    found, leaves = layer(x), [x, *(p for name, p in layer.named_parameters() if "lora_" in name)]
    assert_close_in_sums(found, expected, layer.in_features)
    weights = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(
        *(torch.autograd.grad((y * weights).sum(), leaves) for y in (found, expected)), strict=True
    ):
        assert_close_in_sums(ours, theirs, 2 * layer.out_features)  # products forward and backward


def test_fresh_magnitudes_change_no_bit(tools):
    _, model, _ = build("llama3", "debug", ("q_proj",), settings={"dora": True})
    layer = tools.materialise(model).layers[1].attention.query.bfloat16()
    layer.init_adapters(torch.Generator().manual_seed(0))
    assert not layer.lora_magnitude.any() and layer.lora_a.any()
    x = torch.randn(3, layer.in_features).bfloat16()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


EXPERTS, STACKS = ("gate_proj", "q_proj"), ("down_proj", "q_proj")
REFUSED = [
    ("llama3", ("q_proj",), {"rank_pattern": {"q_prj": 2}}, "lora.rank_pattern: 'q_prj' .*nearest: q_proj"),
    ("llama3", ("q_proj",), {"alpha_pattern": {"k_proj": 2}}, "lora.alpha_pattern: 'k_proj' is no name"),
    ("gpt_oss", STACKS, {"dora": True}, "lora.dora: PEFT has no DoRA for experts, .* their down_proj"),
    ("qwen3", EXPERTS, {"dora": True}, "lora.dora: .* their gate_proj"),
    ("qwen3", EXPERTS, {"rslora": True}, "lora: lora.rslora is for experts' gate_proj, .* lora.alpha = 24.0"),
    ("qwen3", EXPERTS, {"rank_pattern": {"3.gate_proj": 2}}, "lora: the pattern '3.gate_proj' is for experts'"),
    ("qwen3", ("0.gate_proj",), {}, "lora.targets: this model has no '0.gate_proj'"),  # an expert alone
]


@pytest.mark.parametrize(("family", "targets", "settings", "message"), REFUSED)
def test_settings_that_no_module_or_no_file_of_peft_has_are_refused(family, targets, settings, message):
    with pytest.raises(ModelConfigError, match=message):
        build(family, "debug_moe" if family == "qwen3" else "debug", targets, settings=settings)


def test_adapters_that_peft_would_lose_beside_experts_are_not_exported():
    names = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.experts.down_proj"]
    settings = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "targets": ["down_proj"], "rslora": False, "dora": False}
    settings |= {"rank_pattern": {}, "alpha_pattern": {}}
    with pytest.raises(ModelConfigError, match="PEFT takes down_proj for experts in this model"):
        lora.peft_config(settings, names, names, None)
    assert lora.peft_config(settings, names[1:], names, None)["target_parameters"] == ["mlp.experts.down_proj"]
    assert lora.peft_config(settings, names[:1], names[:1], None)["target_modules"] == ["down_proj"]


def test_a_target_with_more_of_a_name_chooses_among_modules_of_the_same_name():
    _, model, names = build("gpt_oss", "debug", ("experts.down_proj", "layers.1.self_attn.q_proj"))
    assert sorted({key.rpartition("_lora_")[0] or key.rpartition(".")[0] for key in adapter_names(model, names)}) == [
        *("block.0.mlp.experts.down", "block.1.attention.query", "block.1.mlp.experts.down")
    ]

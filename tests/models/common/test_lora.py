"""Fresh adapters, their names, frozen weights and dropout. `tests/hf/test_peft.py` compares losses and gradients."""

import pytest
import torch

from tests.support.toy import toy_engine, toy_store, train
from torchround.models import FAMILIES, LoraShape, ModelConfigError, add_adapters
from torchround.models.common.lora import adapter_names, mask_seed
from torchround.planning.partition import Partition

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def build(name, flavor, targets, dropout=0.0, **fields):
    family = FAMILIES[name]
    config = family.config_from_flavor(flavor, vocab_size=50, num_layers=2, **fields)
    plain, adapted = family.build(config), family.build(config)
    names = family.hf_names(config)
    add_adapters(adapted, names, LoraShape(4, 12.0, dropout, targets))
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

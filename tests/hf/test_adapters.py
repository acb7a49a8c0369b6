"""Adapters out of a checkpoint: merged into the weights, and alone in PEFT's format."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.released_run import saved_config
from tests.support.rounding import assert_close_in_sums
from torchround.checkpoint import Checkpointer
from torchround.commands import export_hf
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES, LoraShape, add_adapters

TARGETS = ("q_proj", "o_proj", "gate_proj", "down_proj")
LORA = {"rank": 4, "alpha": 12.0, "dropout": 0.0, "targets": TARGETS}


@pytest.fixture(params=[("llama3", "debug"), ("qwen3", "debug_moe")], ids="-".join)
def trained(request, tmp_path, tools):
    """Return a model with random adapters, and its checkpoint."""
    name, flavor = request.param
    family = FAMILIES[name]
    config = family.config_from_flavor(flavor, vocab_size=50, num_layers=2)
    model = family.build(config)
    add_adapters(model, family.hf_names(config), LoraShape(4, 12.0, 0.0, TARGETS))
    store = HostStore(model)
    store.initialize(model, 0)
    for key, filling in store.filling().items():
        if key.endswith("lora_b"):
            with filling as weight:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))
    # num_layers and vocab_size are not the flavor's own: the base's config.json says so
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(family.config_to_hf(config)))
    run = saved_config(
        model={"family": name, "hf_path": str(tmp_path / "base")}, training={"dtype": "float32"}, lora=LORA
    )
    checkpoint = Checkpointer(tmp_path / "checkpoints").save(1, store.named_views(), {"config": run})
    weights = store.weights()
    model = tools.materialise(model)
    with torch.no_grad():
        for key, parameter in tools.stored_parameters(model).items():
            parameter.copy_(weights[key])
    return model, checkpoint, weights


def test_the_merged_export_has_the_logits_of_base_and_adapters(trained, tmp_path, tools):
    model, checkpoint, _ = trained
    assert (
        export_hf.main([str(checkpoint), str(tmp_path / "merged"), f"--base={tmp_path / 'base'}", "--dtype=float32"])
        == 0
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    batch = tools.micro_batch([[40]], 50)
    with torch.no_grad():
        expected = tools.all_logits(model, batch)
        assert_close_in_sums(theirs(batch.tokens).logits, expected, 1000)


def test_adapters_alone_are_written_under_pefts_names(trained, tmp_path):
    _, checkpoint, weights = trained
    assert (
        export_hf.main([str(checkpoint), str(tmp_path / "adapters"), f"--base={tmp_path / 'base'}", "--adapters"]) == 0
    )
    tensors = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    assert torch.equal(tensors[name], weights["block.1.attention.query.lora_b"])
    if "block.0.mlp.experts.gate_lora_a" in weights:
        name = "base_model.model.model.layers.0.mlp.experts.5.gate_proj.lora_A.weight"
        assert torch.equal(tensors[name], weights["block.0.mlp.experts.gate_lora_a"][5])
    numel = sum(view.numel() for key, view in weights.items() if "lora_" in key)
    assert sum(tensor.numel() for tensor in tensors.values()) == numel
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 12.0, list(TARGETS))


def test_a_run_without_adapters_has_none_to_write(tmp_path, capsys):
    family = FAMILIES["llama3"]
    model = family.build(family.config_from_flavor("debug"))
    store = HostStore(model)
    run = saved_config(model={"family": "llama3", "flavor": "debug"})
    checkpoint = Checkpointer(tmp_path / "checkpoints").save(1, store.named_views(), {"config": run})
    assert export_hf.main([str(checkpoint), str(tmp_path / "adapters"), "--adapters"]) == 2
    assert "lora.rank = 0" in capsys.readouterr().err

"""Models of `transformers` that do not fit: one message each, which names the model type and the reason."""

import sys

import pytest
import torch

from tests.support.toy_decoders import toy_config
from torchround.models import FAMILIES, ModelConfigError

FAMILY = FAMILIES["transformers"]


def built(model_type, **overrides):
    return FAMILY.build(FAMILY.config_from_hf(toy_config(model_type, **overrides).to_dict()))


def refusal(content):
    with pytest.raises(ModelConfigError) as caught:
        FAMILY.build(FAMILY.config_from_hf(content))
    return str(caught.value)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
CODE = {"auto_map": {"AutoConfig": "code.Config"}}


@pytest.mark.parametrize(
    ("model_type", "settings", "content", "reason"),
    [
        ("bart", {}, {}, "encoder"),
        ("git", {}, {}, "more than text"),
        ("mllama", {}, {}, "its text model"),
        ("paligemma", {}, {}, "other masks or logits"),
        ("bert", {}, {}, "0 lists of blocks"),
        ("xlm", {}, {}, "4 lists of blocks"),
        ("blt", {}, {}, "num_hidden_layers"),
        ("deepseek_v32", {}, {}, "indexer"),
        ("zamba2", {}, {}, "hidden states"),
        ("gemma4_unified_text", {}, {}, "for a later block"),
        ("ctrl", {}, {}, "positions"),
        ("jetmoe", {}, {}, "waits"),
        ("phimoe", {}, {}, "random numbers"),
        ("rwkv", {}, {}, "without its layers"),
        ("qwen2", {"attention_dropout": 0.1}, {}, "legal: 0 for a key of dropout"),
        ("gpt2", {"embd_pdrop": 0.1}, {}, "drop draws random numbers"),  # before the blocks
        ("llama", {"rope_parameters": DYNAMIC}, {}, "'dynamic'"),
        ("qwen2", {}, CODE | {"model_type": "mine"}, "auto_map"),
        ("qwen2", {}, {"num_hidden_layers": "four"}, "config.json"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(model_type, settings, content, reason):
    content = toy_config(model_type, **settings).to_dict() | content
    message = refusal(content)
    assert reason in message and repr(content["model_type"]) in message


def test_experts_of_a_width_that_no_grouped_product_takes_are_refused():
    assert "24 bytes" in refusal(toy_config("qwen3_moe", moe_intermediate_size=6).to_dict())


def test_a_known_type_with_code_of_its_own_is_built_from_transformers():
    content = toy_config("qwen2").to_dict() | CODE
    assert FAMILY.build(FAMILY.config_from_hf(content)).names[0] == "embedding"


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("model_type", "settings", "layer", "legal", "too_much", "words"),
    [
        # Rotations of two lengths hold up to the shorter one.
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 1, (64, 4), (65, 4), "to 64"),
        # Sequences end with the table of positions.
        ("gpt2", {"max_position_embeddings": 48}, 0, (48, 4), (49, 4), "to 48"),
        # Grouped products take rows of multiples of 16 bytes.
        ("qwen3_moe", {"moe_intermediate_size": 12}, 1, (8, 4), (8, 2), "24 bytes"),
    ],
)
def test_lengths_and_dtypes_that_do_not_fit_are_refused(model_type, settings, layer, legal, too_much, words):
    layer = built(model_type, **settings).layers[layer]
    assert layer.work(1, *legal, "cpu").boundary_bytes > 0
    with pytest.raises(ModelConfigError, match=words):
        layer.work(1, *too_much, "cpu")


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ('raise ModuleNotFoundError("No module", name="transformers")', ("not installed", "transformers>=")),
        ('raise ModuleNotFoundError("not there", name="tokenizers")', ("not there", "transformers>=")),
        ('raise ImportError("no name", name="transformers.utils")', ("no name", "transformers>=")),
        ('__version__ = "4.57.1"', ("4.57.1",)),
    ],
)
def test_a_transformers_that_cannot_be_imported_or_is_too_old_is_one_message(tmp_path, monkeypatch, package, words):
    (tmp_path / "transformers.py").write_text(package)
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal({"model_type": "qwen2"})
    assert all(word in message for word in words)


def test_a_router_loss_that_is_left_out_is_said_once(caplog):
    config = FAMILY.config_from_hf(toy_config("mixtral").to_dict() | {"output_router_logits": True})
    model = FAMILY.build(config)
    FAMILY.hf_names(config)
    assert len(caplog.messages) == 1
    assert all(buffer.device == torch.device("cpu") for layer in model.layers for buffer in layer.buffers())

"""Models of `transformers` that do not fit: one message each, which names the model type and the reason."""

import builtins
import re
from pathlib import Path

import pytest
import torch

from tests.support.toy_decoders import toy_config
from torchround.models import FAMILIES, ModelConfigError
from torchround.models.borrowed import construction

FAMILY = FAMILIES["transformers"]


def refusal(content):
    with pytest.raises(ModelConfigError) as caught:
        FAMILY.build(FAMILY.config_from_hf(content))
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "an encoder beside its decoder"),
        ("gemma3", "reads more than text"),
        ("bert", "0 lists of blocks"),
        ("xlm", "4 lists of blocks"),
        ("blt", "no num_hidden_layers"),
        ("deepseek_v32", "indexer chooses tokens"),
        ("zamba2", "depend on hidden states"),
        ("gemma4_unified_text", "a KVSharingDict, which outlives its call"),
        ("ctrl", "positions do not begin anew with each document"),
        ("jetmoe", "waits for values on the device"),
        ("phimoe", "draws random numbers while it is trained"),
        ("rwkv", "does not run without its layers"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(model_type, reason):
    message = refusal(toy_config(model_type).to_dict())
    assert reason in message
    assert repr(model_type) in message


def test_dropout_is_refused_with_the_key_that_turns_it_on():
    assert "attention_dropout = 0.1" in refusal(toy_config("qwen2", attention_dropout=0.1).to_dict())


def test_dropout_before_the_blocks_is_refused_too():
    assert "embd_pdrop = 0.1" in refusal(toy_config("gpt2", embd_pdrop=0.1).to_dict())


def test_rotations_that_change_with_the_longest_batch_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert "'dynamic' changes its rotations" in refusal(toy_config("llama", rope_parameters=rope).to_dict())


def test_rotations_of_two_lengths_hold_up_to_the_shorter_one():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    content = toy_config("phi3", rope_parameters=rope, original_max_position_embeddings=64).to_dict()
    model = FAMILY.build(FAMILY.config_from_hf(content))
    assert model.layers[1].work(1, 64, 4, "cpu").forward_flops > 0
    with pytest.raises(ModelConfigError, match=re.escape("training.seq_len up to 64")):
        model.layers[1].work(1, 65, 4, "cpu")


def test_sequences_end_with_the_table_of_positions():
    model = FAMILY.build(FAMILY.config_from_hf(toy_config("gpt2", max_position_embeddings=48).to_dict()))
    assert [layer.longest for layer in model.layers] == [48] * len(model.layers)
    assert model.layers[0].work(1, 48, 4, "cpu").boundary_bytes > 0
    with pytest.raises(
        ModelConfigError, match=re.escape("no row for a later position; legal: training.seq_len up to 48")
    ):
        model.layers[0].work(1, 49, 4, "cpu")


def test_experts_of_a_width_that_the_grouped_product_does_not_take_are_refused():
    def content(width):
        return toy_config("qwen3_moe", moe_intermediate_size=width).to_dict()

    assert "rows of 6 numbers, 24 bytes" in refusal(content(6))
    model = FAMILY.build(FAMILY.config_from_hf(content(12)))
    assert model.layers[1].work(1, 8, 4, "cpu").forward_flops > 0
    with pytest.raises(ModelConfigError, match="rows of 12 numbers, 24 bytes"):
        model.layers[1].work(1, 8, 2, "cpu")


def test_code_of_a_folder_is_never_run():
    content = toy_config("qwen2").to_dict() | {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}
    assert "its own code (auto_map) is never run" in refusal(content)


def test_a_known_type_with_code_of_its_own_is_built_from_transformers():
    content = toy_config("qwen2").to_dict() | {"auto_map": {"AutoConfig": "code.Config"}}
    assert FAMILY.build(FAMILY.config_from_hf(content)).names[0] == "embedding"


def test_quantised_weights_are_refused():
    content = toy_config("qwen2").to_dict() | {"quantization_config": {"quant_method": "awq"}}
    assert "its weights are quantised" in refusal(content)


def test_a_config_that_transformers_refuses_is_one_message():
    assert "config.json is not one of model_type 'qwen2'" in refusal(
        toy_config("qwen2").to_dict() | {"num_hidden_layers": "four"}
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module", name="transformers"), "which is not installed: pip install"),
        (ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers"), "(No module named 'tokenizers')"),
        (ImportError("cannot import name 'is_x'", name="transformers.utils"), "(cannot import name 'is_x')"),
    ],
)
def test_a_transformers_that_cannot_be_imported_is_one_message(monkeypatch, error, message):
    real = builtins.__import__

    def importing(name, *args, **kwargs):
        if name.split(".")[0] == "transformers":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    found = refusal({"model_type": "qwen2"})
    assert message in found
    assert "transformers>=5.20'" in found


def test_a_transformers_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    message = refusal({"model_type": "qwen2"})
    assert "transformers 4.57.1 is too old" in message
    oldest = ".".join(map(str, construction.OLDEST))
    assert oldest in message
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'\ntransformers = ["transformers>={oldest}"]\n' in project


def test_a_router_loss_that_is_left_out_is_said_once(caplog):
    content = toy_config("mixtral").to_dict() | {"output_router_logits": True}
    config = FAMILY.config_from_hf(content)
    model = FAMILY.build(config)
    FAMILY.hf_names(config)
    assert caplog.text.count("trains without it") == 1
    assert all(buffer.device == torch.device("cpu") for buffer in model.constants())

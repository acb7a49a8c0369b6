"""Adapters of PEFT that compute something else than plain LoRA are refused by name, never taken as plain ones."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import save_file

from torchround.config import LoraTable
from torchround.hf import HFError, PretrainedWeights, read_adapters

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
NAMES = {"a": f"{PREFIX}A.weight", "b": f"{PREFIX}B.weight"}
SHAPES = {"a": (2, 24), "b": (24, 2)}
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False}


def read(folder, **setting) -> PretrainedWeights:
    """Write adapters with a setting, and read them."""
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | setting))
    save_file({NAMES[key]: torch.randn(SHAPES[key]) for key in NAMES}, folder / "adapter_model.safetensors")
    return read_adapters(LoraTable(path=str(folder), rank=2, alpha=4.0), NAMES, SHAPES)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': such adapters belong to a base that was"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": {"loftq": 4}}, "init_lora_weights is"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"use_rslora": True}, "use_rslora is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is not supported"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config is not supported"),
    ],
)
def test_adapters_that_compute_something_else_are_never_taken_as_plain_ones(setting, message, tmp_path):
    with pytest.raises(HFError, match=message):
        read(tmp_path, **setting)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", None])
def test_adapters_that_began_in_a_way_that_leaves_the_base_alone_are_read(start, tmp_path):
    weights, views = read(tmp_path, init_lora_weights=start), {key: torch.zeros(SHAPES[key]) for key in NAMES}
    weights.load({name: nullcontext(view) for name, view in views.items()})
    assert all(view.any() for view in views.values())

"""The counted costs of borrowed layers against what the same layers do with real memory."""

import pytest
import torch

from tests.support.toy_decoders import toy_config
from torchround.models import FAMILIES

# Plain attention; a capped loss; experts; documents one by one.
TYPES = ("qwen2", "gemma2", "qwen3_moe", "lfm2")
WIDE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "vocab_size": 2048, "num_hidden_layers": 2}
TOKENS = 128
HYBRID = {"layer_types": ["conv", "full_attention"]}


@pytest.fixture(params=TYPES)
def model(request):
    own = HYBRID if request.param == "lfm2" else {"layer_types": None}
    content = toy_config(request.param, **{**WIDE, **own}).to_dict()
    family = FAMILIES["transformers"]
    return family.build(family.config_from_hf(content))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_of_a_layer_is_at_most_the_estimate_and_at_least_half_of_it(model, tools, dtype):
    works = [layer.work(2, TOKENS, dtype.itemsize, "cpu") for layer in model.layers]
    tools.materialise(model, dtype)
    batch = tools.micro_batch([[TOKENS // 2] * 2] * 2, WIDE["vocab_size"])
    hidden = None
    for name, layer, work in zip(model.names, model.layers, works, strict=True):
        for parameter in layer.parameters():  # as the engine binds them
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros(parameter.shape)
        output = layer(hidden, batch).detach().requires_grad_()
        assert work.boundary_bytes == output.nbytes
        batch._derived.clear()  # the measured run makes the arguments of blocks, as the first of a micro-batch does

        def run(layer=layer, hidden=hidden, output=output):
            layer(hidden, batch).backward(torch.ones_like(output))

        estimate, peak = work.activation_bytes + work.workspace_bytes, tools.measure_peak_bytes(run)
        assert 0.5 * estimate < peak < 1.01 * estimate, f"{name}: {peak} of {estimate}"
        hidden = output

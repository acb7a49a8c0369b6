"""Weight decay by what a parameter is, not by its number of dimensions, in every family and with adapters."""

import pytest

from tests.support.small_decoders import decoder
from torchround.engine.store.host_store import HostStore
from torchround.layer import decayed_names
from torchround.models import FAMILIES

CASES = [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]
# What a projection is called, last of all; every other parameter shifts or scales.
MATRICES = {
    *("embedding.weight", "head.weight", "router.weight"),
    *("query.weight", "key.weight", "value.weight", "output.weight"),
    *("gate.weight", "up.weight", "down.weight", "experts.gate", "experts.up", "experts.down"),
    "experts.gate_up",
}


@pytest.mark.parametrize("name, flavor", CASES, ids=map("-".join, CASES))
def test_projections_decay_and_no_bias_norm_or_sink_does(name, flavor):
    model = FAMILIES[name].build(FAMILIES[name].config_from_flavor(flavor, num_layers=2))
    decayed, shapes = decayed_names(model), model.stored_shapes()
    for parameter in shapes:
        is_matrix = parameter.split(".", parameter.count(".") - 1)[-1] in MATRICES
        assert (parameter in decayed) == is_matrix, parameter
    assert not [p for p in decayed if any(word in p for word in ("bias", "norm", "sinks"))]
    for bundle in HostStore(model).bundles:
        places = sorted(bundle.parameters, key=lambda parameter: parameter.start)
        decay = [parameter.name in decayed for parameter in places]
        assert decay == sorted(decay, reverse=True), "what decays is laid out first"
        assert decaying(bundle) == {parameter.name for parameter in places} & decayed


def decaying(bundle):
    return {
        parameter.name
        for segment in bundle.segments
        for parameter in bundle.parameters
        if segment.start <= parameter.start < segment.stop and segment.rule.weight_decay > 0
    }


def test_adapters_decay():
    model = decoder("llama3", "debug", ("q_proj", "down_proj"), num_layers=1)
    adapters = {name for name in model.stored_shapes() if "lora_" in name}
    assert len(adapters) == 4 and adapters < decayed_names(model)

"""Properties of every family: layers on meta, ties, flavors and their files."""

import json
from dataclasses import replace

import pytest
import torch

from tests.support.rounding import assert_close_in_sums
from torchround.models import FAMILIES, OWN_FAMILIES, ModelConfigError


@pytest.fixture(params=OWN_FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_a_tied_parameter_gets_both_gradients_and_no_second_initialisation(family, tools):
    config = family.config_from_flavor("debug", vocab_size=40, num_layers=1, tied_embeddings=True)
    batch = tools.micro_batch([[30]], 40)
    tied = tools.materialise(family.build(config))
    before = tied.layers[0].weight.detach().clone()
    tied.layers[-1].init_weights(torch.Generator().manual_seed(9))
    assert tied.layers[-1].weight is tied.layers[0].weight and torch.equal(tied.layers[0].weight, before)
    apart = tools.materialise(family.build(replace(config, tied_embeddings=False)))
    with torch.no_grad():
        for name, parameter in tools.stored_parameters(apart).items():
            source = "embedding.weight" if name == "head.weight" else name
            parameter.copy_(tools.stored_parameters(tied)[source])
    for model in (tied, apart):
        tools.loss_sum(model, batch).backward()
    both = apart.layers[0].weight.grad + apart.layers[-1].weight.grad
    # The same terms, grouped differently: two gradients, each a sum over 30 tokens.
    assert_close_in_sums(tied.layers[0].weight.grad, both, 60)


def test_every_flavor_written_as_config_json_is_read_back_as_it_was(family):
    for config in family.flavors.values():
        content = json.loads(json.dumps(family.config_to_hf(config)))
        assert family.config_from_hf(content) == config


@pytest.mark.parametrize(
    ("flavor", "field", "value", "message"),
    [
        ("huge", "num_layers", 1, "flavor 'huge'.*debug"),
        ("debug", "colour", "red", "colour"),
        ("debug", "num_layers", 0, "num_layers = 0"),
        ("debug", "num_kv_heads", 3, "num_kv_heads = 3"),
        ("debug", "head_dim", 7, "head_dim = 7"),
    ],
)
def test_unknown_flavors_and_fields_and_impossible_shapes_are_refused_with_their_values(
    family, flavor, field, value, message
):
    with pytest.raises(ModelConfigError, match=message):
        family.config_from_flavor(flavor, **{field: value})

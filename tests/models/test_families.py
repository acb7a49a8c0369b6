"""Properties of every family: layers on meta, ties, documents kept apart, work counted from shapes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.rounding import assert_close_in_sums
from torchround.models import FAMILIES, OWN_FAMILIES, ModelConfigError


@pytest.fixture(params=OWN_FAMILIES)
def family(request):
    return FAMILIES[request.param]


SMALL = [
    (name, flavor) for name in OWN_FAMILIES for flavor in ("debug", "debug_moe") if flavor in FAMILIES[name].flavors
]


@pytest.fixture(params=SMALL, ids="-".join)
def small(request):
    """Return a family's `build`, and a function to its config for a small flavor with fields replaced."""
    name, flavor = request.param
    family = FAMILIES[name]

    def config(**overrides):
        return family.config_from_flavor(flavor, **overrides)

    return SimpleNamespace(config=config, build=family.build)


def test_every_flavor_builds_without_memory_or_buffers(family):
    for config in family.flavors.values():
        model = family.build(config)  # LayeredModel refuses buffers
        for layer in model.layers:
            assert all(parameter.is_meta for parameter in layer.parameters())
            assert list(layer.buffers()) == []


def test_a_tied_parameter_gets_both_gradients_and_no_second_initialisation(small, tools):
    config = small.config(vocab_size=40, num_layers=1, tied_embeddings=True)
    batch = tools.micro_batch([[30]], 40)
    tied = tools.materialise(small.build(config))
    before = tied.layers[0].weight.detach().clone()
    tied.layers[-1].init_weights(torch.Generator().manual_seed(9))
    assert tied.layers[-1].weight is tied.layers[0].weight and torch.equal(tied.layers[0].weight, before)
    apart = tools.materialise(small.build(replace(config, tied_embeddings=False)))
    with torch.no_grad():
        for name, parameter in tools.stored_parameters(apart).items():
            source = "embedding.weight" if name == "head.weight" else name
            parameter.copy_(tools.stored_parameters(tied)[source])
    for model in (tied, apart):
        tools.loss_sum(model, batch).backward()
    both = apart.layers[0].weight.grad + apart.layers[-1].weight.grad
    # The same terms, grouped differently: two gradients, each a sum over 30 tokens.
    assert_close_in_sums(tied.layers[0].weight.grad, both, 60)


def test_matrix_products_are_counted_as_torch_counts_them(small, tools):
    config = small.config(num_layers=1)
    model, batch = tools.materialise(small.build(config)), tools.micro_batch([[48], [48]], config.vocab_size)
    hidden = None
    for name, layer in zip(model.names, model.layers, strict=True):
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            hidden = layer(hidden, batch)
        work = layer.work(2, 48, 4, "cpu")
        counted = counter.get_total_flops()
        if name == "block.0" and not tools.COUNTS_ATTENTION:
            # Scores and mixing, 2 FLOPs a multiply-add.
            counted += 2 * 2 * 2 * 48 * 48 * config.num_heads * config.head_dim
        if name == "head":
            # A custom operation, which the counter cannot look into.
            counted += 2 * 96 * config.vocab_size * config.hidden_size
        assert work.forward_flops == counted, name


SINGLE_AND_PACKED = [(torch.float32, False), (torch.bfloat16, True)]


@pytest.mark.parametrize(("dtype", "is_packed"), SINGLE_AND_PACKED)
def test_activation_bytes_are_within_two_percent_of_what_is_kept(small, tools, dtype, is_packed):
    config = small.config(num_layers=1)
    documents = [[32, 64], [96]] if is_packed else [[96], [96]]
    model = tools.materialise(small.build(config), dtype)
    batch = tools.micro_batch(documents, config.vocab_size)
    hidden = None
    for name, layer in zip(model.names[:-1], model.layers[:-1], strict=True):
        kept, output = kept_bytes(layer, hidden, batch)
        work = layer.work(2, 96, dtype.itemsize, "cpu")
        assert work.boundary_bytes == sum(t.numel() * t.element_size() for t in as_tuple(output))
        if name == "block.0" and not is_packed and layer.attention.window is None:
            kept += 2 * 96 * 96 * dtype.itemsize  # the estimate allows for a mask of packed documents
        assert kept == pytest.approx(work.activation_bytes, rel=0.02), name
        hidden = as_leaves(output)


def as_tuple(hidden):
    return (hidden,) if isinstance(hidden, torch.Tensor) else hidden


def as_leaves(hidden):
    leaves = tuple(tensor.detach().requires_grad_() for tensor in as_tuple(hidden))
    return leaves[0] if isinstance(hidden, torch.Tensor) else leaves


@pytest.mark.parametrize(("dtype", "is_packed"), SINGLE_AND_PACKED)
def test_peak_of_a_layer_is_at_most_the_estimate_and_at_least_half_of_it(small, tools, dtype, is_packed):
    config = small.config(num_layers=1, vocab_size=4096)
    model = tools.materialise(small.build(config), dtype)
    batch = tools.micro_batch([[56, 200] if is_packed else [256]] * 4, config.vocab_size)
    hidden = None
    for name, layer in zip(model.names, model.layers, strict=True):
        for parameter in layer.parameters():  # as the engine binds them
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros(parameter.shape)
        output = as_leaves(layer(hidden, batch))
        gradients = tuple(torch.ones_like(tensor) for tensor in as_tuple(output))

        def run(layer=layer, hidden=hidden, gradients=gradients):
            torch.autograd.backward(as_tuple(layer(hidden, batch)), gradients)

        work = layer.work(4, 256, dtype.itemsize, "cpu")
        estimate, peak = work.activation_bytes + work.workspace_bytes, tools.measure_peak_bytes(run)
        assert 0.5 * estimate < peak < 1.01 * estimate, f"{name}: {peak} of {estimate}"
        hidden = output


def kept_bytes(layer, hidden, batch):
    """Count the bytes that autograd keeps for this layer's backward, without its parameters and the micro-batch."""
    ours = [*layer.parameters(), *batch.tensors()]
    known = {tensor.untyped_storage().data_ptr() for tensor in ours}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(hidden, batch)
    return sum(storages.values()), output


def test_an_unknown_flavor_or_field_is_named(family):
    with pytest.raises(ModelConfigError, match=r"unknown .* flavor 'huge'; known: .*debug"):
        family.config_from_flavor("huge")
    with pytest.raises(ModelConfigError, match="colour"):
        family.config_from_flavor("debug", colour="red")


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_layers", 0, "num_layers = 0"),
        ("num_kv_heads", 3, "num_heads = .* not a multiple of num_kv_heads = 3"),
        ("head_dim", 7, "head_dim = 7"),
    ],
)
def test_impossible_shapes_are_refused_with_their_values(family, field, value, message):
    with pytest.raises(ModelConfigError, match=message):
        family.config_from_flavor("debug", **{field: value})


def test_every_flavor_written_as_config_json_is_read_back_as_it_was(family):
    for config in family.flavors.values():
        content = json.loads(json.dumps(family.config_to_hf(config)))
        assert family.config_from_hf(content) == config

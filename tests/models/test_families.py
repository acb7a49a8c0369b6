"""Properties of every family: layers on meta, ties, documents kept apart, work counted from shapes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.rounding import assert_close_in_sums
from torchround.layer import IGNORED_LABEL, MicroBatch
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


def test_names_are_the_layers_in_order(small):
    model = small.build(small.config(num_layers=3))
    assert model.names == ("embedding", "block.0", "block.1", "block.2", "head")


def test_a_tied_head_holds_the_embedding_itself(small):
    tied = small.build(small.config(tied_embeddings=True))
    apart = small.build(small.config(tied_embeddings=False))
    assert tied.layers[-1].weight is tied.layers[0].weight
    assert apart.layers[-1].weight is not apart.layers[0].weight


def test_a_tied_head_leaves_the_embedding_as_it_was_initialised(small, tools):
    model = tools.materialise(small.build(small.config(tied_embeddings=True)))
    before = model.layers[0].weight.detach().clone()
    model.layers[-1].init_weights(torch.Generator().manual_seed(9))
    assert torch.equal(model.layers[0].weight, before)


def test_a_tied_parameter_gets_both_gradients(small, tools):
    config = small.config(vocab_size=40, num_layers=1, tied_embeddings=True)
    batch = tools.micro_batch([[30]], 40)
    tied = tools.materialise(small.build(config))
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


def test_a_packed_batch_equals_its_documents_one_by_one(small, tools):
    config = without_balance(small.config(num_layers=2))
    batch = tools.micro_batch([[7, 1, 24], [20, 12]], config.vocab_size)
    packed, single = (tools.materialise(small.build(config)) for _ in range(2))
    tools.loss_sum(packed, batch).backward()
    total = torch.zeros(())
    for row in range(2):
        for document in batch.document_ids[row].unique():
            chosen = batch.document_ids[row] == document
            loss = tools.loss_sum(single, MicroBatch(*(tensor[row][chosen][None] for tensor in batch.tensors())))
            loss.backward()
            total += loss.detach()
    # Other matrix sizes round elsewhere. Losses are sums of positive terms: 168 roundings of 2^-24. Gradients add up
    # terms of either sign, and errors in the norm of a tensor mostly cancel.
    torch.testing.assert_close(tools.loss_sum(packed, batch).detach(), total, rtol=1e-5, atol=0)
    expected = tools.stored_parameters(single)
    for name, parameter in tools.stored_parameters(packed).items():
        error = (parameter.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 1e-5, f"{name}: relative error {error}"


def test_positions_that_do_not_restart_change_the_loss(small, tools):
    # Rotations are relative, so a shift of a whole document is invisible; a jump inside one is not.
    config = small.config(num_layers=2)
    model, batch = tools.materialise(small.build(config)), tools.micro_batch([[16]], config.vocab_size)
    with torch.no_grad():
        for name, parameter in tools.stored_parameters(model).items():
            if "attention" in name and "norm" not in name:
                parameter.mul_(20)  # fresh attention is nearly uniform for any positions
        jumped = replace(batch, positions=batch.positions + 50 * (batch.positions >= 8))
        shifted = replace(batch, positions=batch.positions + 50)
        plain = tools.loss_sum(model, batch)
        # Angles of up to 66 radians are rounded to 66 * 2^-24 = 4e-6, and the scores here are scaled up 400 times.
        torch.testing.assert_close(tools.loss_sum(model, shifted), plain, rtol=1e-4, atol=0)
        assert (tools.loss_sum(model, jumped) - plain).abs() > 1e-2


def test_ignored_labels_add_nothing(small, tools):
    config = small.config(num_layers=1)
    model, batch = tools.materialise(small.build(config)), tools.micro_batch([[12]], config.vocab_size)
    with torch.no_grad():
        whole = tools.loss_sum(model, batch)
        halves = []
        for part in (slice(0, 5), slice(5, 12)):
            labels = torch.full_like(batch.labels, IGNORED_LABEL)
            labels[:, part] = batch.labels[:, part]
            halves.append(tools.loss_sum(model, replace(batch, labels=labels)))
    # 11 positive terms and their logits in another order: far below 168 roundings of 2^-24.
    torch.testing.assert_close(sum(halves), whole, rtol=1e-5, atol=0)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [[[96], [96]], [[32, 64], [96]]], ids=["single", "packed"])
def test_activation_bytes_are_within_two_percent_of_what_is_kept(small, tools, dtype, documents):
    config = small.config(num_layers=1)
    model = tools.materialise(small.build(config), dtype)
    batch = tools.micro_batch(documents, config.vocab_size)
    hidden = None
    for name, layer in zip(model.names[:-1], model.layers[:-1], strict=True):
        kept, output = kept_bytes(layer, hidden, batch)
        work = layer.work(2, 96, dtype.itemsize, "cpu")
        assert work.boundary_bytes == sum(t.numel() * t.element_size() for t in as_tuple(output))
        if name == "block.0" and documents == [[96], [96]] and layer.attention.window is None:
            kept += 2 * 96 * 96 * dtype.itemsize  # the estimate allows for a mask of packed documents
        assert kept == pytest.approx(work.activation_bytes, rel=0.02), name
        hidden = as_leaves(output)


def without_balance(config):
    """Turn off the balance penalty: it is one of sequences, so documents one by one have another."""
    moe = getattr(config, "moe", None)
    return replace(config, moe=replace(moe, balance_coefficient=0.0)) if moe else config


def as_tuple(hidden):
    return (hidden,) if isinstance(hidden, torch.Tensor) else hidden


def as_leaves(hidden):
    leaves = tuple(tensor.detach().requires_grad_() for tensor in as_tuple(hidden))
    return leaves[0] if isinstance(hidden, torch.Tensor) else leaves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [[[256]] * 4, [[56, 200]] * 4], ids=["single", "packed"])
def test_peak_of_a_layer_is_at_most_the_estimate_and_at_least_half_of_it(small, tools, dtype, documents):
    config = small.config(num_layers=1, vocab_size=4096)
    model = tools.materialise(small.build(config), dtype)
    batch = tools.micro_batch(documents, config.vocab_size)
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


def test_the_vocabulary_follows_the_tokenizer(family):
    config = family.config_from_flavor("debug", vocab_size=1234)
    assert family.build(config).layers[0].weight.shape[0] == 1234


def test_the_debug_flavor_has_about_a_million_parameters(family, tools):
    total = sum(p.numel() for p in tools.stored_parameters(family.build(family.flavors["debug"])).values())
    assert 0.8e6 < total < 1.5e6


def test_every_flavor_written_as_config_json_is_read_back_as_it_was(family):
    for config in family.flavors.values():
        content = json.loads(json.dumps(family.config_to_hf(config)))
        assert family.config_from_hf(content) == config

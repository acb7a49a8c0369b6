"""Costs that layers count from shapes against what they do: products that torch counts, bytes kept, and peaks of memory."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.small_decoders import decoder
from tests.support.toy_decoders import toy_config
from torchround.models import FAMILIES
from torchround.models.borrowed import borrowed_layers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
STACKED = (*ATTENTION, "gate_up_proj", "down_proj")
F32, BF16 = torch.float32, torch.bfloat16
NIGHT = pytest.mark.nightly


def own(name, flavor, targets=(), **fields):
    return decoder(name, flavor, targets, (4, 12.0, 0.1), num_layers=1, **fields)


def borrowed(model_type, layer_types=None):
    wide = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "vocab_size": 2048}
    wide |= {"num_hidden_layers": len(layer_types or ["one"])}
    content = toy_config(model_type, **wide, layer_types=layer_types).to_dict()
    return FAMILIES["transformers"].build(FAMILIES["transformers"].config_from_hf(content))


def as_the_engine_binds(model, tools, dtype):
    trained = {key: parameter.requires_grad for key, parameter in tools.stored_parameters(model).items()}
    for key, parameter in tools.stored_parameters(tools.materialise(model, dtype)).items():
        parameter.requires_grad_(trained[key])
        if trained[key]:
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros(parameter.shape)
    return model


def as_tuple(hidden):
    return (hidden,) if isinstance(hidden, torch.Tensor) else hidden


def as_leaves(hidden):
    leaves = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in as_tuple(hidden))
    return leaves[0] if isinstance(hidden, torch.Tensor) else leaves


@pytest.mark.parametrize(
    ("name", "flavor", "targets"),
    [
        *(("llama3", "debug", ()), ("qwen3", "debug", ()), ("qwen3", "debug_moe", ()), ("gpt_oss", "debug", ())),
        *(("llama3", "debug", ATTENTION + MLP), ("qwen3", "debug_moe", ATTENTION + MLP), ("gpt_oss", "debug", STACKED)),
        *(("qwen3", "debug_moe", ("q_proj", "down_proj")), ("gpt_oss", "debug", ("v_proj", "down_proj"))),
    ],
)
def test_matrix_products_are_counted_as_torch_counts_them(name, flavor, targets, tools):
    model = as_the_engine_binds(own(name, flavor, targets, vocab_size=50), tools, F32)
    batch = tools.micro_batch([[48], [48]], 50)
    block, head = model.layers[1:]
    hidden = as_leaves(model.layers[0](None, batch))
    work, heads = block.work(2, 48, 4), block.attention.num_heads * block.attention.head_dim
    # One product of attention; it has two forward and four backward. A version that counts them adds the scores that
    # its backward recomputes.
    product = 2 * 2 * 48 * 48 * heads
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(hidden, batch)
    assert counter.get_total_flops() + (0 if tools.COUNTS_ATTENTION else 2) * product == work.forward_flops
    with FlopCounterMode(display=False) as counter:
        hidden = block(hidden, batch)
        torch.autograd.backward(as_tuple(hidden), tuple(map(torch.ones_like, as_tuple(hidden))))
    counted = counter.get_total_flops() + (-1 if tools.COUNTS_ATTENTION else 6) * product
    assert counted == work.forward_flops + work.backward_flops
    with FlopCounterMode(display=False) as counter:  # all logits: into the chunked loss it does not look
        head.logits(as_leaves(as_tuple(hidden)[0])).sum().backward()
    work = head.work(2, 48, 4)
    assert counter.get_total_flops() == work.forward_flops + work.backward_flops


OWN_ROWS = [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]


@pytest.mark.parametrize(("dtype", "is_packed"), [(F32, False), (BF16, True)])
@pytest.mark.parametrize("case", OWN_ROWS, ids="-".join)
def test_activation_bytes_are_within_two_percent_of_what_is_kept(case, dtype, is_packed, tools):
    model = tools.materialise(own(*case), dtype)
    batch = tools.micro_batch([[32, 64], [96]] if is_packed else [[96], [96]], 50)
    hidden = None
    for name, layer in zip(model.names[:-1], model.layers[:-1], strict=True):
        kept, output = kept_bytes(layer, hidden, batch)
        work = layer.work(2, 96, dtype.itemsize, "cpu")
        assert work.boundary_bytes == sum(tensor.nbytes for tensor in as_tuple(output))
        if name == "block.0" and not is_packed and layer.attention.window is None:
            kept += 2 * 96 * 96 * dtype.itemsize  # the estimate allows for a mask of packed documents
        assert kept == pytest.approx(work.activation_bytes, rel=0.02), name
        hidden = as_leaves(output)


def kept_bytes(layer, hidden, batch):
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *batch.tensors())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(hidden, batch)
    return sum(storages.values()), output


@pytest.mark.parametrize(
    ("build", "case", "dtype", "documents", "least"),
    [
        (own, ("gpt_oss", "debug", ()), F32, [[128]] * 4, 0.5),
        (own, ("qwen3", "debug_moe", ()), BF16, [[28, 100]] * 4, 0.5),
        *(pytest.param(own, (*case, ()), F32, [[128]] * 4, 0.5, marks=NIGHT) for case in OWN_ROWS[:3]),
        *(
            pytest.param(own, (*case, ()), BF16, [[28, 100]] * 4, 0.5, marks=NIGHT)
            for case in OWN_ROWS
            if case[1] != "debug_moe"
        ),
        pytest.param(own, ("llama3", "debug", ATTENTION + MLP), F32, [[28, 100]] * 4, 0.4, marks=NIGHT),
        (own, ("qwen3", "debug_moe", ATTENTION + MLP), BF16, [[28, 100]] * 4, 0.4),
        pytest.param(own, ("gpt_oss", "debug", STACKED), F32, [[28, 100]] * 4, 0.4, marks=NIGHT),
        pytest.param(own, ("gpt_oss", "debug", ("v_proj", "down_proj")), F32, [[28, 100]] * 4, 0.4, marks=NIGHT),
        # Plain attention; a capped loss; experts; documents one by one.
        pytest.param(borrowed, ("qwen2",), BF16, [[64, 64]] * 2, 0.5, marks=NIGHT),
        (borrowed, ("qwen3_moe",), BF16, [[64, 64]] * 2, 0.5),
        pytest.param(
            borrowed, ("gemma2", ["sliding_attention", "full_attention"]), F32, [[64, 64]] * 2, 0.5, marks=NIGHT
        ),
        (borrowed, ("lfm2", ["conv", "full_attention"]), F32, [[64, 64]] * 2, 0.5),
    ],
)
def test_peak_of_a_layer_is_at_most_the_estimate_and_a_good_part_of_it(build, case, dtype, documents, least, tools):
    model = build(*case, **({"vocab_size": 2048} if build is own else {}))
    sequences, tokens = len(documents), sum(documents[0])
    works = [layer.work(sequences, tokens, dtype.itemsize, "cpu") for layer in model.layers]
    as_the_engine_binds(model, tools, dtype)

    def fresh():
        return replace(tools.micro_batch(documents, 2048), dropout_seed=1 if build is own and case[2] else None)

    batch, hidden = fresh(), None
    for name, layer, work in zip(model.names, model.layers, works, strict=True):
        output = as_leaves(layer(hidden, batch))
        # The measured run makes the arguments of borrowed blocks, as the first of a micro-batch does.
        batch = fresh() if build is borrowed else batch

        gradients = tuple(map(torch.ones_like, as_tuple(output)))

        def run(layer=layer, hidden=hidden, gradients=gradients, batch=batch):
            torch.autograd.backward(as_tuple(layer(hidden, batch)), gradients)

        if hidden is not None or least == 0.5:  # a frozen embedding has no backward
            estimate, peak = work.activation_bytes + work.workspace_bytes, tools.measure_peak_bytes(run)
            assert least * estimate < peak < 1.01 * estimate, f"{name}: {peak} of {estimate}"
        hidden = output


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=NIGHT) for name in ("qwen3_5_text", "lfm2")), "bloom"])
def test_a_long_sequence_costs_what_shorter_ones_tell(name, monkeypatch):
    """Counting a million tokens of linear attention, as a dry run asks for, would take hours."""
    family = FAMILIES["transformers"]
    model = family.build(family.config_from_hf(toy_config(name).to_dict()))
    block = next(layer for layer in model.layers if getattr(layer, "alone", False))
    counted = block.work(1, 2048, 4)
    monkeypatch.setattr(borrowed_layers, "COUNTED_LENGTHS", (256, 512, 1024))
    found = block.work(1, 2048, 4)
    assert found.boundary_bytes == counted.boundary_bytes
    assert found.products[0].flops == pytest.approx(counted.products[0].flops, rel=1e-6)
    assert found.activation_bytes == pytest.approx(counted.activation_bytes, rel=0.01)
    assert 0.99 * counted.workspace_bytes <= found.workspace_bytes <= 3 * counted.workspace_bytes

"""Training on packed frozen weights has the bits of training on the numbers that they stand for."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support import engine_rows
from tests.support.engine_rows import FAMILY_BLOCKS, STEPS, Row, assert_same
from tests.support.small_decoders import packed_decoder, write_base
from torchround.engine.compiled import LayerCompiler
from torchround.engine.worker import transfers
from torchround.models.common import feed_forward
from torchround.models.common.feed_forward import MoEShape


def row_of(name, *arguments, family=("llama3", "debug"), sizes=(), targets=("q_proj", "up_proj"), **changes):
    changes = {"batches": STEPS[:2]} | changes
    row = Row(*arguments, dtype="bf16", adapters=True, before=write_base, **changes)
    return replace(row, build=lambda: packed_decoder(name, family, targets, **dict(sizes)))


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MIXED = {"family": ("qwen3", "debug_moe"), "sizes": {"moe": MoEShape(3, 2, 128)}}
ADAPTED = {"family": ("gpt_oss", "debug"), "targets": EXPERTS, "kept": "all"}
MANY = {"moe": MoEShape(16, 1, 128)}
ROWS = {
    "nf4": row_of("nf4", 1, 1, "each"),
    "fp8, one stage": row_of("fp8", 2, 1, "one", "async", batches=STEPS),
    "mxfp4, resumed": row_of("mxfp4", 3, 1, "forward", stopped=True, evaluates=True, rounds=2, batches=STEPS),
    "nf4, machines": row_of("nf4", 2, 2, "backward", recompute="layer"),
    "fp8, experts": row_of("fp8", 2, 1, "forward", **MIXED),
    "mxfp4, adapted experts": row_of("mxfp4", 2, 1, "each", sizes={"moe": MoEShape(4, 2, 128)}, **ADAPTED),
    "nf4, experts by need": row_of(
        "nf4",
        2,
        1,
        "forward",
        family=("qwen3", "debug_moe"),
        sizes=MANY,
        rounds=2,
        experts_by_need=True,
        evaluates=True,
    ),
    "mxfp4, experts by need, kept": row_of("mxfp4", 3, 1, "each", sizes=MANY, experts_by_need=True, **ADAPTED),
    "nf4, kept, bounded": row_of("nf4", 8, 1, "each", "bounded", clip="layer", kept="all", link="early"),
}


@pytest.mark.parametrize("name", ROWS)
def test_training_has_the_bits_of_a_reference_on_unpacked_weights(name):
    row = ROWS[name]
    packed = row.model().packed
    assert not [path for path in packed if "router" in path or "norm" in path or "lora" in path]
    assert len(packed) >= 6 * FAMILY_BLOCKS
    assert_same(row.run_all(), row.reference())


@pytest.mark.compiles
def test_compiled_layers_have_the_bits_of_compiled_layers_on_unpacked_weights(monkeypatch):
    monkeypatch.setattr(engine_rows, "LayerCompiler", lambda model, _: LayerCompiler(model))
    row = replace(row_of("nf4", 2, 1, "forward"), compiled="layers")
    store = row.store(row.model())
    write_base(store)
    values = {name: weight.clone() for name, weight in store.weights().items()}
    plain = replace(
        row, build=lambda: replace(row.model(), packed={}), before=lambda store: store.write_weights(values)
    )
    expected = plain.run_all()
    found = row.run_all()
    expected.state = {name: value for name, value in expected.state.items() if name in found.state}
    expected.device_weights = found.device_weights = []
    assert_same(found, expected)


@pytest.mark.compiles
def test_compiled_experts_have_the_same_bits_on_any_number_of_devices(monkeypatch):
    # Products that unpack are other code than products of numbers, around which a compiler fuses in other ways.
    monkeypatch.setattr(engine_rows, "LayerCompiler", lambda model, _: LayerCompiler(model))
    one, two = (replace(row_of("nf4", n, 1, "forward", **MIXED), compiled="layers") for n in (1, 2))
    expected = one.run_all()
    # They never ask for experts, however few the tokens are.
    monkeypatch.setattr(transfers, "EXPERTS_PER_TOKEN", 0)
    assert_same(two.run_all(), expected)


# By format: a family, its sizes and the share of the 16-bit base that is left of it.
SHARES = {
    "nf4": (("llama3", "debug"), {}, 0.29),
    "mxfp4": (("gpt_oss", "debug"), {"moe": MoEShape(4, 2, 128)}, 0.28),
    "fp8": (("llama3", "debug"), {}, 0.52),
}


@pytest.mark.parametrize("name", SHARES)
def test_host_memory_and_uploads_shrink_by_what_packing_saves(name):
    family, sizes, share = SHARES[name]
    uploaded, packed_row = {}, row_of(name, 1, 1, "each", family=family, sizes=sizes, targets=("q_proj",))
    for row in (packed_row, replace(packed_row, build=lambda: replace(packed_row.build(), packed={}))):
        model = row.model()
        store = row.store(model)
        store.initialize(model, seed=0)
        row.before(store)
        with row.engine(model, store, row.table) as engine:
            row.train(engine)
            [device] = engine.devices
        uploaded[bool(model.packed)] = device.uploaded_bytes
        if model.packed:
            bundles = [bundle for bundle in store.bundles if bundle.packed is not None]
    plain_bytes = sum(bundle.unpacked_numel for bundle in bundles) * 2
    packed_bytes = sum(weights.nbytes for bundle in bundles for weights in bundle.device_weights)
    assert packed_bytes <= share * plain_bytes
    # Once for each forward and backward stage of each step, and for the validation.
    assert uploaded[False] - uploaded[True] == (2 * len(packed_row.batches) + 1) * (plain_bytes - packed_bytes)


@pytest.mark.parametrize("name", SHARES)
def test_only_experts_with_rows_come_up_by_need(name, monkeypatch):
    routed, uploaded = [], {}
    make_routes = feed_forward.make_routes
    monkeypatch.setattr(
        feed_forward, "make_routes", lambda *arguments: routed.append(make_routes(*arguments)) or routed[-1]
    )
    for by_need in (True, "auto", False):
        row = row_of(name, 1, 1, "one", family=("qwen3", "debug_moe"), sizes=MANY, experts_by_need=by_need)
        model = row.model()
        store = row.store(model)
        row.before(store)
        with row.engine(model, store, row.table) as engine:
            del routed[:]
            engine.evaluate(row.batches[0][:1]).loss_sums()
            uploaded[by_need] = engine.devices[0].uploaded_bytes
    stacks = [bundle for bundle in store.bundles if bundle.packed is not None and bundle.packed.by_matrix]
    untouched = {layer + 1: sum(a == b for a, b in pairwise(routes.bounds)) for layer, routes in enumerate(routed)}
    assert all(0 < count < 16 for count in untouched.values())
    saved = sum(untouched[bundle.layers[0]] * bundle.packed.nbytes(bundle.unpacked_numel) // 16 for bundle in stacks)
    assert uploaded[False] - uploaded[True] == saved
    assert uploaded["auto"] == uploaded[False], "too many tokens"


@pytest.mark.parametrize("name", SHARES)
def test_biases_and_routers_are_not_packed(name):
    packed = packed_decoder(name, ("gpt_oss", "debug"), ("q_proj",), moe=MoEShape(4, 2, 128)).packed
    assert [path for path in packed if path.endswith("experts.down")]
    assert not [path for path in packed if "bias" in path or "router" in path or "norm" in path]

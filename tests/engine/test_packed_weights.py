"""Training on packed frozen weights has the bits of training on the numbers that they stand for."""

from dataclasses import replace

import pytest
import torch

from tests.support import engine_rows
from tests.support.engine_rows import FAMILY_BLOCKS, Row, assert_same
from tests.support.small_decoders import small_decoder
from torchround.engine.compiled import LayerCompiler
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.lora import pack_base
from torchround.packed_formats import FORMATS

SIZES = {
    "num_layers": FAMILY_BLOCKS,
    "hidden_size": 128,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 64,
    "ffn_size": 256,
}


def packed_model(name, family=("llama3", "debug"), targets=("q_proj", "up_proj"), **changes):
    return pack_base(small_decoder(*family, targets, **SIZES | changes), FORMATS[name])


def write_base(store):
    """Write frozen weights that do not depend on the store's seed: a checkpoint does not hold packed ones."""
    for bundle in store.bundles:
        if bundle.packed is not None:
            numbers = torch.randn(bundle.unpacked_numel, generator=torch.Generator().manual_seed(bundle.index)) / 12
            values = {p.name: numbers[p.start : p.stop].view(p.shape) for p in bundle.parameters}
            store.write_weights(values)


def row_of(name, *arguments, family=("llama3", "debug"), sizes=(), **changes):
    row = Row(*arguments, dtype="bf16", adapters=True, before=write_base, **changes)
    return replace(row, build=lambda: packed_model(name, family, **dict(sizes)))


ROWS = {
    "nf4": row_of("nf4", 1, 1, "each"),
    "fp8, one stage": row_of("fp8", 2, 1, "one", "async"),
    "mxfp4, resumed": row_of("mxfp4", 3, 1, "forward", stopped=True, evaluates=True, rounds=2),
    "nf4, machines": row_of("nf4", 2, 2, "backward", recompute="layer"),
    "fp8, experts": row_of("fp8", 2, 1, "forward", family=("qwen3", "debug_moe"), sizes={"moe": MoEShape(3, 2, 128)}),
    "nf4, kept, bounded": row_of("nf4", 8, 1, "each", "bounded", clip="layer", kept="all", link="early"),
}


@pytest.mark.parametrize("name", ROWS)
def test_training_has_the_bits_of_a_reference_on_unpacked_weights(name):
    row = ROWS[name]
    packed = row.model().packed
    assert not [path for path in packed if "router" in path or "norm" in path or "lora" in path]
    assert len(packed) >= 6 * FAMILY_BLOCKS
    expected = row.reference()
    expected.state = {name: v for name, v in expected.state.items() if name.split("/")[1] not in packed}
    assert_same(row.run_all(), expected)


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

"""Layers of a user, with nested values and batches of their own, on several machines, and what they cannot use."""

from dataclasses import replace

import pytest
import torch

from tests.support.any_layers import any_batches, any_model
from tests.support.engine_rows import Row, assert_same
from tests.support.reference import Reference
from tests.support.toy import PARTITIONS, ToyEmbedding, planted_model, toy_batches, toy_engine, toy_model, train
from torchround.engine.compiled import LayerCompiler
from torchround.planning.partition import Partition

PARTITION = Partition((2, 2), 2, (3, 1))
# As many stages as fit: two on each device.
TWO_STAGES_EACH = {1: Partition((3,), 3, (3,)), 2: Partition((2, 1, 1), 2, (4,))}


def test_a_buffer_without_values_is_named_with_its_layer():
    model = toy_model()
    model.layers[2].register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match=r"layer block.1: its buffers \['table'\] are on `meta`, without values"):
        replace(model)


def test_several_machines_train_them_to_the_bits_of_one():
    """Steps of one and of three micro-batches: a machine may have no part, and sizes are measured on each."""
    batches = [any_batches(count, count) for count in (4, 1, 3)]
    row = Row(2, 2, batches=batches, held_out=any_batches(1), build=any_model, partition=PARTITION)
    assert_same(row.run_all(), row.alone().run())


@pytest.mark.parametrize("num_devices", [1, 2])
def test_frozen_weights_that_are_written_anew_reach_the_devices(num_devices):
    """Weights that stay on a device from pass to pass go up again."""
    model, batches = any_model(trained=False), any_batches(2)
    with toy_engine(TWO_STAGES_EACH[num_devices], num_devices, model=model) as engine:
        uploaded = []
        for _ in range(4):
            uploaded.append(sum(report.uploaded_bytes for report in engine.evaluate(batches).reports()))
        # The weights went up once: one stage is in each end of a device's space.
        assert uploaded[0] - uploaded[-1] == sum(bundle.numel * 4 for bundle in engine.store.bundles)
        engine.drain()
        engine.store.write_weights({name: weight * 0.5 for name, weight in engine.store.weights().items()})
        expected = [Reference.of(model, engine.store).outputs(batch)[-1].item() for batch in batches]
        for _ in range(4):
            assert engine.evaluate(batches).loss_sums() == expected


def test_layers_that_name_no_part_to_keep_are_recomputed_with_one_warning(caplog):
    found = []
    for kept in ((), ((), ("down",), ("down",), (), (), ())):
        with toy_engine(PARTITION, 2, model=any_model(), kept=kept) as engine:
            found.append(train(engine, [any_batches(2)]))
    assert found[0] == found[1]
    assert caplog.text.count("recorded 0 bytes to keep of a micro-batch, but it was to keep down.") == 1


def test_layers_that_may_be_compiled_run_as_they_are_if_they_cannot():
    model, batches = any_model(), any_batches(2)
    compiler = LayerCompiler(model, "eager")
    with toy_engine(PARTITION, 2, model=model, compiler=compiler) as engine:
        losses = engine.evaluate(batches).loss_sums()
    assert losses == [Reference.of(model, engine.store).outputs(batch)[-1].item() for batch in batches]


def test_a_layer_that_returns_a_nested_value_is_not_compiled_to_a_flat_one(monkeypatch, caplog):
    # What compiles takes seconds to import, and has no part in this.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)

    class DictEmbedding(ToyEmbedding):
        def forward(self, hidden, batch):
            return {"value": super().forward(hidden, batch)}

    model = planted_model(lambda hidden, batch: hidden["value"] if isinstance(hidden, dict) else hidden)
    model = replace(model, layers=(DictEmbedding(), *model.layers[1:]))
    [batches], losses = toy_batches(1, 2), []
    for compiler in (None, LayerCompiler(model, "eager")):
        with toy_engine(PARTITIONS["one stage"], 1, model=model, compiler=compiler) as engine:
            losses.append(engine.evaluate(batches).loss_sums())
    assert losses[0] == losses[1]
    assert "embedding cannot be compiled (TypeError: it returns a nested value" in caplog.text

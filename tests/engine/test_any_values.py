"""Any nested value may go between layers: training and forward passes equal a plain loop's bit for bit."""

import threading

import pytest
import torch
from torch.nn import functional as F

from tests.support.any_layers import any_batches, any_model, assert_same_value, first, outputs
from tests.support.race_checker import AccessLog, find_races
from tests.support.reference import Reference
from tests.support.toy import assert_same_state, linked, toy_batches, toy_engine, toy_model, toy_store, train, watched
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.worker.slots import Packing
from torchround.planning.partition import Partition
from torchround.planning.update_modes import ASYNC, BOUNDED, SYNC

PARTITIONS = {
    "one stage": Partition((), 6, ()),
    "one layer a stage": Partition((1,) * 5, 1, (1,) * 5),
    "several": Partition((2, 2), 2, (3, 1)),
}


def train_both(model, num_devices, partition, stale=0, mode=SYNC, **settings):
    store, steps = toy_store(model, mode=mode), [any_batches(3, seed) for seed in range(3)]
    loop = Reference.of(model, store, stale=stale, rounds=settings.get("rounds", 1))
    with toy_engine(
        PARTITIONS[partition], num_devices, model=model, store=store, stale_layers=stale, **settings
    ) as engine:
        assert train(engine, steps) == loop.train(steps)
    assert_same_state(store.named_views(), loop.state())


@pytest.mark.parametrize(
    ("num_devices", "partition", "settings"),
    [
        (1, "one stage", {}),
        (2, "one layer a stage", {"layerwise_recompute": True}),
        (3, "several", {"rounds": 2}),
        (8, "several", {"layerwise_recompute": True}),
        (2, "several", {"mode": BOUNDED, "stale": 2}),
        (3, "several", {"mode": BOUNDED, "stale": 2, "layerwise_recompute": True}),
    ],
)
def test_training_is_bitwise_that_of_a_plain_loop(num_devices, partition, settings):
    """Inputs of layers that begin anew, such as stale ones, are nested too."""
    train_both(any_model(), num_devices, partition, **settings)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_forward_pass_returns_what_the_last_layer_returned(num_devices, trained):
    model, batches = any_model(outputs, trained), any_batches(4)
    store = toy_store(model)
    expected = [Reference.of(model, store).outputs(batch)[-1] for batch in batches]
    with toy_engine(PARTITIONS["several"], num_devices, model=model, store=store) as engine:
        results = [engine.forward(batches) for _ in range(3)]
        found = [result.outputs() for result in results]
    for of_pass in found:
        for output, wanted in zip(of_pass, expected, strict=True):
            assert output["same"][0] is output["same"][1]
            assert_same_value(output, wanted)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_model_without_trained_weights_scores_and_holds_only_device_weights(num_devices):
    trained, frozen = toy_model(), toy_model()
    for layer in frozen.layers:
        layer.requires_grad_(False)
    [batches] = toy_batches(1, 4)
    losses = []
    for model in (trained, frozen):
        with toy_engine(Partition((3, 3), 1, (1, 1, 2, 2)), num_devices, model=model) as engine:
            losses.append(engine.evaluate(batches).loss())
            assert len(engine.forward(batches).outputs()) == len(batches)
        kinds = {name.split("/")[0] for name in engine.store.named_views()}
        assert kinds == ({"weights", "exp_avg", "exp_avg_sq"} if model is trained else {"weights"})
    assert engine.store.nbytes() == sum(bundle.numel * 4 for bundle in engine.store.bundles)
    assert losses[0] == losses[1]


def test_a_forward_pass_is_refused_inside_of_a_step():
    model, [batches] = toy_model(), toy_batches(1, 2)
    with toy_engine(Partition((), 7, ()), 1, model=model) as engine:
        engine.forward_backward(batches)
        with pytest.raises(EngineUsageError, match=r"forward\(\) was called between"):
            engine.forward(batches)
        engine.step(1e-3)


def test_a_value_that_cannot_travel_is_named_with_the_stage_that_made_it():
    def with_object(layer, hidden, batch):
        return {**first(layer, hidden, batch), "module": layer}

    model = any_model()
    model.layers[0].compute = with_object
    engine = toy_engine(PARTITIONS["one layer a stage"], 2, model=model)
    with pytest.raises(PipelineError, match=r"layer\.0.*any_layers\.AnyLayer between two layers"):
        engine.forward(any_batches(2)).outputs()


def test_each_device_has_constants_of_its_own_and_gives_them_back():
    tables = set()

    def looking(layer, hidden, batch):
        tables.add((threading.current_thread().name, layer.table.data_ptr()))
        return first(layer, hidden, batch)

    model = any_model()
    model.layers[0].compute = looking
    before = [layer.table.clone() for layer in model.layers]
    assert model.constant_bytes() == len(model.layers) * 256
    with toy_engine(PARTITIONS["several"], 2, model=model) as engine:
        for _ in range(2):
            train(engine, [any_batches(2)])
    threads, addresses = (set(column) for column in zip(*tables, strict=True))
    assert len(threads) == len(addresses) == len(tables) == 2
    assert model.layers[0].table.data_ptr() not in addresses
    assert all(torch.equal(layer.table, table) for layer, table in zip(model.layers, before, strict=True))


@pytest.mark.parametrize(("num_devices", "partition"), [(1, "one stage"), (2, "one layer a stage"), (2, "several")])
def test_parameters_with_a_dtype_of_their_own_compute_in_it(num_devices, partition):
    def half(layer, hidden, batch):
        assert layer.weight.dtype == torch.bfloat16
        value, transposed, expanded, skip = hidden
        return F.linear(value.bfloat16(), layer.weight).float(), transposed, expanded, skip

    model = any_model(own_dtypes={"layer.4.weight": torch.bfloat16})
    model.layers[4].compute = half
    train_both(model, num_devices, partition)


@pytest.mark.parametrize(("mode", "num_devices"), [(SYNC, 1), (ASYNC, 3), (BOUNDED, 3)], ids=str)
def test_no_race_with_nested_values_outputs_and_sizes_met_late(num_devices, mode):
    """Outputs and evaluations are not awaited, so that they run beside the steps before and after."""
    log, model = AccessLog(), any_model()
    stale = 2 if mode is BOUNDED else 0
    options = {"observer": log, "wrap": lambda device: watched(linked(device), log), "stale_layers": stale}
    with toy_engine(PARTITIONS["several"], num_devices, model=model, mode=mode, **options) as engine:
        for step in range(4):
            engine.forward(any_batches(3, step))
            engine.forward_backward(any_batches(3, step))
            engine.step(1e-2)
    assert sum(entry.action == "access" for entry in log.entries) > 100
    assert find_races(log.entries) == []


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_fault_in_a_forward_pass_is_located_and_earlier_outputs_stay(num_devices):
    def failing(layer, hidden, batch):
        if batch.inputs[0, 0] == 0:
            raise ValueError("planted")
        return outputs(layer, hidden, batch)

    model, batches = any_model(failing), any_batches(3)
    faulty = any_batches(3)
    faulty[1].inputs[0, 0] = 0
    engine = toy_engine(PARTITIONS["several"], num_devices, model=model)
    early = engine.forward(batches)
    early.wait()
    with pytest.raises(PipelineError, match=r"forward stage \(layer.4 .. layer.5\), micro-batch 1.*planted"):
        engine.forward(faulty).outputs()
    assert len(early.outputs()) == 3


def test_strides_of_dimensions_of_size_1_survive_a_packing_because_kernels_are_chosen_by_them():
    # One channel in the order of channels last: contiguous either way, and a convolution looks at the strides.
    image = torch.randn(2, 1, 4, 3).as_strided((2, 1, 4, 3), (12, 1, 3, 1))
    packing = Packing.of([image])
    [found] = packing.views(torch.empty(packing.nbytes, dtype=torch.uint8))
    assert found.stride() == image.stride() == (12, 1, 3, 1)

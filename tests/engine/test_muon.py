"""Muon through the engine: momentum on the host, orthogonalisation on the devices, bit for bit a plain loop's."""

import pytest
import torch

from tests.support.muon_loop import MuonLoop
from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.toy import (
    MAX_NORM,
    PARTITIONS,
    assert_same_state,
    linked,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.worker import orthogonalise
from torchround.optim import make_optimizer
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.simulation.dispatch import dispatch_tasks
from torchround.pipeline.timeline import TaskKind

LR = 1e-2
STEPS = 4
TABLE = MuonTable(lr=LR, eps=1e-3, adamw_lr=0.5 * LR)
PARTITION = PARTITIONS["backward coarser"]


def muon_store(model, table=TABLE, dtype=torch.float32, **options):
    return toy_store(model, dtype, optimizer=make_optimizer(table), **options)


def muon_engine(model, store, num_devices=2, partition=PARTITION, table=TABLE, **options):
    return toy_engine(model, store, partition, num_devices, optimizer=table, **options)


def muon_run(num_devices, table=TABLE, steps=STEPS, tied=False, wrap=lambda device: device, **options):
    """Train the toy model; return its losses and its state."""
    store_options = {key: options.pop(key) for key in ("policy", "dtype") if key in options}
    model = toy_model(tied)
    store = muon_store(model, table, **store_options)
    with muon_engine(model, store, num_devices, table=table, wrap=wrap, **options) as engine:
        losses = train(engine, toy_batches(steps, micro_batches=4), LR)
    return losses, store.named_views()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_sync_training_is_bitwise_that_of_a_plain_loop(num_devices, tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = muon_store(model)
    loop = MuonLoop(model, store.weights(), tied, TABLE)
    with muon_engine(model, store, num_devices) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


@pytest.mark.parametrize(
    "keys", [{"nesterov": False}, {"adjust_lr": "original"}, {"momentum": 0.5, "weight_decay": 0.0}], ids=str
)
def test_each_setting_is_that_of_a_plain_loop(keys):
    table = TABLE.model_copy(update=keys)
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    store = muon_store(model, table)
    loop = MuonLoop(model, store.weights(), False, table)
    with muon_engine(model, store, table=table) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_clipping_by_layer_counts_the_parameters_of_adamw_alone(tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=2)
    store = muon_store(model)
    loop = MuonLoop(model, store.weights(), tied, TABLE, clip="layer")
    with muon_engine(model, store, clip="layer") as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_async_training_is_bitwise_a_plain_loop_that_applies_gradients_one_step_late(num_devices):
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=4)
    store = muon_store(model, policy=ASYNC)
    loop = MuonLoop(model, store.weights(), False, TABLE)
    with muon_engine(model, store, num_devices) as engine:
        losses = train(engine, batches, LR)
    expected, waiting = [], None
    for micro_batches in batches:
        loss, gradients = loop.gradients(micro_batches)  # at the weights before the last update
        expected.append(loss)
        if waiting is not None:
            loop.update(waiting, LR)
        waiting = {name: gradient.clone() for name, gradient in gradients.items()}
    loop.update(waiting, LR)
    assert losses == expected
    views = store.named_views()
    assert_same_state({name: views[name] for name in loop.state()}, loop.state())


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 2},
        {"rounds": 2, "policy": ASYNC},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "policy": ASYNC, "wrap": linked},
        {"dtype": torch.bfloat16, "table": TABLE.model_copy(update={"state": "compact"})},
        {"dtype": torch.float16},
        {"compile_update": True},
    ],
    # Not the objects' own texts: an address would differ between the processes that collect.
    ids=["two rounds", "two rounds, async", "bf16", "bf16, async, one link", "compact", "fp16", "compiled"],
)
def test_any_number_of_devices_gives_the_same_bits(options):
    losses, state = muon_run(1, **options)
    for num_devices in (3, 8):
        other_losses, other = muon_run(num_devices, **options)
        assert other_losses == losses
        assert_same_state(other, state)


def test_several_calls_of_a_step_give_the_bits_of_rounds():
    _, expected = muon_run(2, rounds=2, steps=2)
    model = toy_model()
    store = muon_store(model)
    with muon_engine(model, store, accumulates=True) as engine:
        for micro_batches in toy_batches(2, micro_batches=4):
            labels = sum(batch.num_labels() for batch in micro_batches)
            for call in (micro_batches[:2], micro_batches[2:]):
                engine.forward_backward(call, num_labels=labels)
            engine.step(LR)
    assert_same_state(store.named_views(), expected)


def test_evaluations_between_steps_change_no_bit():
    _, expected = muon_run(3)
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=4)
    store = muon_store(model)
    with muon_engine(model, store, 3) as engine:
        for micro_batches in batches:
            engine.forward_backward(micro_batches)
            engine.step(LR)
            engine.evaluate(micro_batches[:1])
    assert_same_state(store.named_views(), expected)


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_two_machines_give_the_bits_of_one_with_as_many_rounds(policy):
    case = Case(toy_batches(3, micro_batches=4), store={"policy": policy}, optimizer=TABLE)
    assert_equal_to_one_machine(case, 2)


def test_only_the_parameters_of_adamw_are_clipped():
    """With matrices of huge gradients a common norm would leave nothing of the other parameters' steps."""
    model, batches = toy_model(), toy_batches(2, micro_batches=2)
    store = muon_store(model)
    loop = MuonLoop(model, store.weights(), False, TABLE)
    with muon_engine(model, store) as engine:
        results = []
        for micro_batches in batches:
            results.append(engine.forward_backward(micro_batches))
            engine.step(LR)
        norms = [result.update().grad_norm for result in results]
    loop.train(batches, LR)
    assert norms == loop.norms, "the reported norm is the whole gradient's"
    assert min(norms) > MAX_NORM, "the test must clip"
    assert_same_state(store.named_views(), loop.state())


def test_a_skipped_step_leaves_the_momentum_as_it_is():
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store = muon_store(model)
    with muon_engine(model, store) as engine:
        train(engine, batches[:1], LR)
        before = {name: view.clone() for name, view in store.named_views().items()}
        for device_weight in store.bundles[1].device_weights:
            device_weight[0] = torch.inf
        result = engine.forward_backward(batches[1])
        engine.step(LR)
        assert result.update().skipped
    weights = {name: view for name, view in before.items() if not name.startswith("weights")}
    assert_same_state({name: store.named_views()[name] for name in weights}, weights)


@pytest.mark.parametrize("policy", [ASYNC_PREDICT, BOUNDED], ids=lambda policy: policy.name)
def test_a_policy_that_muon_cannot_follow_is_refused_in_one_message(policy):
    model = toy_model()
    with pytest.raises(EngineUsageError, match="and muon has none|and the steps of muon wait for the devices"):
        muon_engine(model, muon_store(model, policy=policy))


def test_a_fault_of_an_orthogonalisation_names_its_device_and_layers_and_leaves_the_last_update(monkeypatch):
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store = muon_store(model)
    engine = muon_engine(model, store)
    with engine:
        train(engine, batches[:1], LR)
        before = {name: view.clone() for name, view in store.named_views().items()}

        def fail(matrices):
            raise RuntimeError("planted")

        monkeypatch.setattr(orthogonalise, "orthogonalised", fail)
        engine.forward_backward(batches[1])
        engine.step(LR)
        with pytest.raises(PipelineError, match=r"device cpu:\d, orthogonalisation stage \(block\.\d\).*planted"):
            engine.drain()
    assert store.is_consistent and store.step == 1
    assert_same_state(store.named_views(), before)


def test_a_model_without_matrices_in_blocks_trains_with_adamw_alone():
    model = toy_model()
    for layer in model.layers[1:-1]:
        layer.requires_grad_(False)
    store = muon_store(model)
    assert not any(segment.rule.uses_direction for bundle in store.trained for segment in bundle.segments)
    with muon_engine(model, store) as engine:
        assert len(set(train(engine, toy_batches(3, micro_batches=2), LR))) == 3


def test_each_bundle_goes_to_the_device_whose_turn_it_is():
    """Deepest layer first: its gradient is whole first."""
    model = toy_model()
    store = muon_store(model)
    taken = {}
    with muon_engine(model, store, 2) as engine:
        result = engine.forward_backward(toy_batches(1, micro_batches=2)[0])
        engine.step(LR)
        for landed in result.update().directions:
            taken[landed.layer] = landed.device
    first = len(result.tasks) % 2
    assert taken == {5: first, 4: 1 - first, 3: first, 2: 1 - first, 1: first}


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
def test_engine_and_simulator_give_each_device_the_same_jobs_in_the_same_order(partition, num_devices, policy):
    model = toy_model()
    with muon_engine(model, muon_store(model, policy=policy), num_devices, partition) as engine:
        results = []
        for micro_batches in toy_batches(3, micro_batches=2):
            results.append(engine.forward_backward(micro_batches))
            engine.step(LR)
        for result in results:
            result.update()
    delay = policy.versions - 1
    in_slots = [(task.slot, [stage_of(task.stage)]) for result in results for task in result.tasks]
    for made, handed_out in zip(results, results[delay:], strict=False):
        for slot in handed_out.direction_slots[:num_devices]:
            landed = [each.layer for each in made.update().directions if each.device == slot % num_devices]
            in_slots.append((slot, [("orthogonalise", layer, layer + 1) for layer in landed]))
    in_slots.sort()
    layers = [LayerCost(name, 1.0, 1.0, job_s=float(name in model.names[1:-1])) for name in model.names]
    tasks = dispatch_tasks(partition, Costs(tuple(layers)), num_devices, 2, 1, update=policy.name, steps=3)
    for device in range(num_devices):
        simulated = [stage_of(task) for task in tasks if is_first_of_stage(task, device)]
        jobs = [job for slot, jobs in in_slots if slot % num_devices == device for job in jobs]
        assert jobs == simulated


def stage_of(stage):
    """Return kind and layers of a stage, or of a simulated task."""
    layers = getattr(stage, "layers", None) or range(stage.start, stage.stop)
    return stage.kind.value, layers.start, layers.stop


def is_first_of_stage(task, device):
    """Tell whether a simulated task is the first micro-batch of a stage of this device, or one of its jobs."""
    kinds = (TaskKind.FORWARD, TaskKind.FUSED, TaskKind.BACKWARD, TaskKind.ORTHOGONALISE)
    return task.device == device and task.kind in kinds and task.micro_batch <= 0


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_pass_that_begins_with_its_fused_stage_keeps_the_jobs_before_it(num_devices):
    """Its direction jobs come before its own tasks, and must not be forgotten with those of the passes before."""
    options = {"policy": ASYNC, "partition": PARTITIONS["one stage"], "steps": 6}
    losses, _ = muon_run(num_devices, **options)
    assert losses == muon_run(2, **{**options, "partition": PARTITION})[0]

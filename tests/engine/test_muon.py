"""Muon's jobs on the devices: when they run, and what a fault in one leaves. Its results are in `test_rows.py`."""

import threading
from collections import Counter

import pytest

from tests.support.faults import Bomb, armed
from tests.support.toy import (
    PARTITIONS,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
    watched,
)
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.board import Observer
from torchround.engine.device import Stream
from torchround.engine.errors import PipelineError
from torchround.optim import make_optimizer
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.partition import SpanKind
from torchround.planning.update_modes import ASYNC, SYNC
from torchround.simulate.dispatch import dispatch_tasks

LR = 1e-2
STEPS = 4
TABLE = MuonTable(lr=LR, eps=1e-3, adamw_lr=0.5 * LR)
PARTITION = PARTITIONS["backward coarser"]


def muon_store(model, **options):
    return toy_store(model, optimizer=make_optimizer(TABLE), **options)


def muon_engine(model, store, num_devices=2, partition=PARTITION, table=TABLE, **options):
    return toy_engine(partition, num_devices, model=model, store=store, optimizer=table, **options)


def test_a_fault_of_an_orthogonalisation_names_its_device_and_layers_and_leaves_the_last_update():
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store = muon_store(model)
    bomb = Bomb(None)
    engine = muon_engine(model, store, **armed(bomb))
    with engine:
        train(engine, batches[:1], LR)
        before = {name: view.clone() for name, view in store.named_views().items()}
        bomb.place = "an uploaded look-ahead"
        engine.forward_backward(batches[1])
        engine.step(LR)
        with pytest.raises(PipelineError, match=r"device cpu:\d, orthogonalisation stage \(block\.\d\).*planted"):
            engine.drain()
    assert store.is_consistent and store.step == 1
    assert_same_state(store.named_views(), before)


class DownloadedBytes(Observer):
    def __init__(self):
        self.by_step, self._lock = Counter(), threading.Lock()

    def begins(self, device, stream, reads, writes, copied_bytes):
        if stream is Stream.GRADIENT_DOWNLOAD:
            with self._lock:
                self.by_step[device.step_of[stream]] += copied_bytes


def test_a_direction_job_leaves_the_gradients_on_their_way_to_their_own_step():
    """With more devices than stages, a device has computed gradients of the next step before its job."""
    model, watcher = toy_model(), DownloadedBytes()
    store, partition = muon_store(model, mode=ASYNC), PARTITIONS["one stage"]
    with muon_engine(model, store, 3, partition, wrap=lambda device: watched(device, watcher)) as engine:
        train(engine, toy_batches(STEPS, micro_batches=2), LR)
    assert len(watcher.by_step) == STEPS and len(set(watcher.by_step.values())) == 1


def test_a_model_without_matrices_in_blocks_trains_with_adamw_alone():
    model = toy_model()
    for layer in model.layers[1:-1]:
        layer.requires_grad_(False)
    store = muon_store(model)
    assert not any(segment.rule.uses_direction for bundle in store.trained for segment in bundle.segments)
    with muon_engine(model, store) as engine:
        assert len(set(train(engine, toy_batches(3, micro_batches=2), LR))) == 3


@pytest.mark.parametrize(
    ("partition", "num_devices", "mode"),
    [
        ("one stage", 3, ASYNC),
        ("one layer a stage", 1, SYNC),
        ("forward coarser", 8, ASYNC),
        ("backward coarser", 2, SYNC),
    ],
)
def test_engine_and_simulator_give_each_device_the_same_jobs_in_the_same_order(partition, num_devices, mode):
    model = toy_model()
    with muon_engine(model, muon_store(model, mode=mode), num_devices, PARTITIONS[partition]) as engine:
        results = []
        for micro_batches in toy_batches(3, micro_batches=2):
            results.append(engine.forward_backward(micro_batches))
            engine.step(LR)
        for result in results:
            result.update()
    delay = mode.versions - 1
    tasks = [report.task for result in results for report in result.reports()]
    in_slots = [(task.slot, [stage_of(task.stage)]) for task in tasks]
    # Each step has a slot for each device among those that no stage takes.
    stages = {slot for slot, _ in in_slots}
    free = [slot for slot in range(len(stages) + num_devices * len(results)) if slot not in stages]
    for step, made in enumerate(results[: len(results) - delay]):
        for slot in free[num_devices * step : num_devices * (step + 1)]:
            landed = [span.layers.start for device, span in made.update().directions if device == slot % num_devices]
            in_slots.append((slot, [("orthogonalise", layer, layer + 1) for layer in landed]))
    in_slots.sort()
    layers = [LayerCost(name, 1.0, 1.0, job_s=float(name in model.names[1:-1])) for name in model.names]
    tasks = dispatch_tasks(PARTITIONS[partition], Costs(tuple(layers)), num_devices, 2, 1, update=mode.name, steps=3)
    for device in range(num_devices):
        simulated = [stage_of(task) for task in tasks if is_first_of_stage(task, device)]
        jobs = [job for slot, jobs in in_slots if slot % num_devices == device for job in jobs]
        assert jobs == simulated


def stage_of(stage):
    layers = getattr(stage, "layers", None) or range(stage.start, stage.stop)
    return stage.kind.value, layers.start, layers.stop


def is_first_of_stage(task, device):
    kinds = (SpanKind.FORWARD, SpanKind.FUSED, SpanKind.BACKWARD, SpanKind.ORTHOGONALISE)
    return task.device == device and task.kind in kinds and task.micro_batch <= 0

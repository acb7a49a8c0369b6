"""A trace of a step holds every stage slot, transfer and update, in the simulator's own types."""

import json
from itertools import pairwise

from tests.support.toy import (
    OPTIMIZER,
    PARTITIONS,
    assert_same_state,
    toy_batches,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.tracing import Tracer, write_trace
from torchround.pipeline.timeline import COMPUTE, HOST, TaskKind

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=4)


def trace_second_step(num_devices):
    """The timeline of the second of three steps, and the host store after them."""
    model = toy_model()
    store = toy_store(model)
    tracer = Tracer([CpuDevice(index) for index in range(num_devices)])
    with Engine(model, store, tracer.devices, PARTITION, optimizer=OPTIMIZER) as engine:
        train(engine, BATCHES[:1])
        tracer.start()
        result = engine.forward_backward(BATCHES[1])
        engine.step(1e-2)
        timeline = tracer.stop(result)
        train(engine, BATCHES[2:])
    return timeline, store


def test_a_trace_holds_every_piece_of_every_stage_and_micro_batch():
    timeline, _ = trace_second_step(2)
    pieces = {
        (task.kind, task.layers.start, task.micro_batch)
        for task in timeline.tasks
        if task.stream == COMPUTE and task.device != HOST
    }
    expected = set()
    for stage in PARTITION.stages():
        kinds = [TaskKind(stage.kind.value)]
        if kinds == [TaskKind.BACKWARD]:
            kinds = [TaskKind.RECOMPUTE, TaskKind.BACKWARD]
        expected |= {(kind, stage.start, m) for kind in kinds for m in range(4)}
    assert pieces == expected


def test_a_trace_holds_all_bytes_moved_and_an_update_of_each_layer():
    timeline, store = trace_second_step(2)
    weights = sum(task.moves_bytes for task in timeline.tasks if task.kind is TaskKind.WEIGHTS)
    gradients = sum(task.moves_bytes for task in timeline.tasks if task.kind is TaskKind.GRADIENTS)
    whole = sum(bundle.numel for bundle in store.bundles) * 4
    head = sum(store.bundles[index].numel for index in store.layer_bundles(6)) * 4
    assert (weights, gradients) == (2 * whole - head, whole)
    assert [task.layers.start for task in timeline.tasks if task.kind is TaskKind.UPDATE] == list(range(7))


def test_pieces_of_one_device_do_not_overlap_and_updates_follow_the_gradients():
    timeline, _ = trace_second_step(3)
    for device in range(3):
        mine = timeline.of_device(device)
        assert all(timeline.end_s[a] <= timeline.start_s[b] for a, b in pairwise(mine))
    landed = max(
        end
        for task, end in zip(timeline.tasks, timeline.end_s, strict=True)
        if task.kind is TaskKind.GRADIENTS
    )
    updated = [
        start
        for task, start in zip(timeline.tasks, timeline.start_s, strict=True)
        if task.kind is TaskKind.UPDATE
    ]
    assert min(updated) >= landed


def test_tracing_changes_no_bit():
    _, traced = trace_second_step(2)
    model = toy_model()
    store = toy_store(model)
    with Engine(model, store, [CpuDevice(0)], PARTITION, optimizer=OPTIMIZER) as engine:
        train(engine, BATCHES)
    assert_same_state(traced.named_views(), store.named_views())


def test_the_file_opens_as_a_trace_with_every_event_in_the_step(tmp_path):
    timeline, _ = trace_second_step(2)
    write_trace(timeline, "step 2", tmp_path / "trace" / "step-2.json")
    events = json.loads((tmp_path / "trace" / "step-2.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(task.duration_s > 0 for task in timeline.tasks)
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in spans)

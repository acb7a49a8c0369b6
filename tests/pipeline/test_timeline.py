"""A trace has one event per task that takes time, in microseconds, on named rows."""

import json

from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.partition import Partition
from torchround.pipeline.simulation.dispatch import dispatch_tasks
from torchround.pipeline.simulation.simulator import simulate
from torchround.pipeline.timeline import trace_events


def test_a_trace_has_each_task_on_its_device_at_its_time():
    costs = Costs(tuple(LayerCost(f"{i}", 0.001, 0.002, optimizer_s=0.0005) for i in range(3)), hop_s=0.0001)
    tasks = dispatch_tasks(Partition((2,), 1, (1, 1)), costs, 2, 3, 1, update="async", steps=2)
    line = simulate(tasks, 2)
    trace = json.loads(json.dumps(trace_events([("first", line), ("second", line)])))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * len(tasks)
    for event, task, start_s in zip(spans, tasks, line.start_s, strict=False):
        assert event["ts"] == start_s * 1e6
        assert event["dur"] == task.duration_s * 1e6
        assert event["args"]["micro_batch"] == task.micro_batch
        assert event["args"]["step"] == task.step + 1
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {event["args"]["step"] for event in spans} == {1, 2}
    assert sorted(names.values()) == sorted(
        f"{name}: {row}" for name in ("first", "second") for row in ("device 0", "device 1", "optimizer")
    )
    assert {event["pid"] for event in spans} == set(names)
    labels = {event["name"] for event in spans}
    assert {"F 0-1", "FB 2", "R 1", "B 1", "B 0", "update 2"} <= labels

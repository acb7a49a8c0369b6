"""The simulator against closed forms, published makespans, the rule that nothing waits without a cause, and traces."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.published_models import PARTITIONS, by_night, published_costs, published_partition
from tests.support.random_costs import costs as random_costs
from tests.support.random_costs import exact_step_s, partitions
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.partition import Partition, SpanKind
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import SAME_MOMENT_S, ScheduleDeadlockError, simulate, steady_state
from torchround.simulate.timeline import Task, trace_events

QWEN_1_7B, LLAMA_8B, GPT_OSS, QWEN_32B, QWEN_235B = PARTITIONS


def simulate_step(partition, costs, num_devices, num_micro_batches, rounds):
    return simulate(dispatch_tasks(partition, costs, num_devices, num_micro_batches, rounds), num_devices)


def uniform_stages(num_stages):
    num_backward = num_stages // 2
    num_forward = num_stages - 1 - num_backward
    num_blocks = num_forward * num_backward
    blocks = tuple(
        LayerCost(f"block.{i}", 1 / num_backward, max(0.0, 1 / num_forward - 1 / num_backward))
        for i in range(num_blocks)
    )
    partition = Partition.from_lists([num_backward] * num_forward, 1, [num_forward] * num_backward)
    return partition, Costs((*blocks, LayerCost("head", 0.5, 0.5)))


def steady_step_s(partition, costs, num_devices, micro_batches, rounds, update):
    def tasks(steps):
        return dispatch_tasks(partition, costs, num_devices, micro_batches, rounds, update=update, steps=steps)

    return steady_state(tasks, num_devices)[1]


@pytest.mark.parametrize(
    ("name", "makespan_ms", "published_ms"),
    by_night(
        [
            (QWEN_1_7B, 2286.0, None),
            (LLAMA_8B, 6100.5, None),
            (GPT_OSS, 7371.4, 7282.8),
            (QWEN_32B, 24042.8, 23978.8),
            (QWEN_235B, 28250.0, None),
        ]
    ),
)
def test_published_partitions_give_the_published_makespans(name, makespan_ms, published_ms):
    """The two published makespans that differ ran the head's forward before its input was there."""
    partition, costs = published_partition(name), published_costs(name)
    line = simulate_step(partition, costs, 8, 16, rounds=2)
    assert line.makespan_s * 1e3 == pytest.approx(makespan_ms, abs=0.05)
    if published_ms is not None:
        early_s = costs.layers[-1].forward_s
        tasks = [
            replace(task, after=tuple((before, lag_s - early_s) for before, lag_s in task.after))
            if task.kind is SpanKind.FUSED
            else task
            for task in dispatch_tasks(partition, costs, 8, 16, 2)
        ]
        assert simulate(tasks, 8).makespan_s * 1e3 == pytest.approx(published_ms, abs=0.05)


@pytest.mark.parametrize(("devices", "size", "rounds", "stages"), [(2, 2, 1, 3), (4, 5, 2, 6), (4, 4, 2, 13)])
def test_uniform_stages_take_the_exact_makespan_and_have_no_bubble_in_the_steady_state(devices, size, rounds, stages):
    partition, costs = uniform_stages(stages)
    assert partition.num_stages == stages
    line = simulate_step(partition, costs, devices, size * rounds, rounds)
    last_slot = rounds * stages - 1
    assert line.makespan_s == pytest.approx(last_slot // devices * size + last_slot % devices + size, rel=1e-9)
    step_s = steady_step_s(partition, costs, devices, size * rounds, rounds, "async")
    assert step_s == pytest.approx(size * rounds * stages / devices, rel=1e-9)


def test_sync_steady_state_is_one_step_from_idle_devices_plus_the_exposed_update():
    """Later layers are updated while earlier ones already run, so only the first stage's updates show."""
    partition, costs = published_partition(QWEN_1_7B), published_costs(QWEN_1_7B)
    idle_s = simulate_step(partition, costs, 8, 16, 2).makespan_s
    for update_s in (0.0, 1e-3):
        slow = Costs(tuple(replace(layer, optimizer_s=update_s) for layer in costs.layers), costs.hop_s)
        expected_s = idle_s + partition.forward[0] * update_s
        assert steady_step_s(partition, slow, 8, 16, 2, "sync") == pytest.approx(expected_s, rel=1e-9)


@given(
    data=st.data(),
    costs=random_costs(updates=False, max_layers=5),
    num_devices=st.integers(1, 9),
    micro_batches=st.integers(1, 6),
    update_share=st.sampled_from([0.0, 0.5, 0.95, 33 / 32, 1.05, 1.2, 3.0]),
)
def test_a_run_counts_as_settled_only_when_its_steps_repeat(data, costs, num_devices, micro_batches, update_share):
    """The updates take about as long as a step, so they fall behind slowly; the exact step time is the reference."""
    partition, rounds = data.draw(partitions(costs.num_layers)), data.draw(st.integers(1, micro_batches))
    arguments = (num_devices, micro_batches, rounds, "async")
    update_s = update_share * exact_step_s(partition, costs, *arguments) / costs.num_layers
    costs = Costs(tuple(replace(layer, optimizer_s=update_s) for layer in costs.layers), costs.hop_s)
    exact_s = exact_step_s(partition, costs, *arguments)
    # 128 steps are the most that are simulated; what has not built up by then is left out.
    assert steady_step_s(partition, costs, *arguments) == pytest.approx(exact_s, rel=1e-2, abs=1e-9)


def test_a_circle_of_waits_is_an_error_that_names_a_task():
    tasks = [Task(at, SpanKind.FORWARD, 1.0, range(1), 3 * at, after=((1 - at, 0.0),)) for at in (0, 1)]
    with pytest.raises(ScheduleDeadlockError, match="2 of 2 tasks.*micro-batch 0"):
        simulate(tasks, 2)


@st.composite
def random_tasks(draw):
    durations = st.sampled_from([0.0, 0.1, 0.3, 1.0])
    tasks = []
    for index in range(draw(st.integers(1, 20))):
        befores = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        after = tuple((before, draw(durations)) for before in sorted(befores))
        device, stream = draw(st.integers(0, 2)), draw(st.sampled_from(["compute", "copy"]))
        tasks.append(
            Task(device, SpanKind.FORWARD, draw(durations), range(1), index, after, stream, draw(st.integers(0, 3)))
        )
    return tasks


def stream_orders(line):
    keys = {(task.device, task.stream) for task in line.tasks}
    by_start = sorted(range(len(line.tasks)), key=lambda i: (line.start_s[i], line.end_s[i], i))
    return [[i for i in by_start if (line.tasks[i].device, line.tasks[i].stream) == key] for key in sorted(keys)]


@given(random_tasks())
def test_in_list_order_every_task_starts_at_the_last_of_its_causes(tasks):
    line = simulate(tasks, 3)
    last_on_stream = {}
    for index, task in enumerate(tasks):
        causes = [0.0] + [line.end_s[before] + lag_s for before, lag_s in task.after]
        key = (task.device, task.stream)
        if key in last_on_stream:
            causes.append(line.end_s[last_on_stream[key]])
        assert line.start_s[index] == pytest.approx(max(causes), abs=20 * SAME_MOMENT_S)
        assert line.end_s[index] == line.start_s[index] + task.duration_s
        last_on_stream[key] = index


@given(random_tasks())
def test_ready_first_streams_never_overlap_never_idle_and_never_pass_over_a_better_task(tasks):
    line = simulate(tasks, 3, ready_first=True)
    ready = [max([0.0] + [line.end_s[b] + lag for b, lag in task.after]) for task in tasks]
    for order in stream_orders(line):
        for position, index in enumerate(order):
            start = line.start_s[index]
            assert start >= ready[index] - 1e-9
            free = line.end_s[order[position - 1]] if position else 0.0
            assert start >= free - 1e-9
            # No task behind it in the queue was ready at an earlier moment when the stream was free.
            assert all(start <= max(free, ready[later]) + 1e-9 for later in order[position:])
            strictly_ready = [later for later in order[position + 1 :] if ready[later] < start - 1e-9]
            if tasks[index].duration_s > 0:
                assert all(tasks[index].priority <= tasks[later].priority for later in strictly_ready)


def test_peak_bytes_counts_what_is_held_between_tasks_and_what_lives_inside_one():
    tasks = [
        Task(0, SpanKind.FORWARD, 1.0, range(1), 0, holds_bytes=5, scratch_bytes=2),
        Task(0, SpanKind.FORWARD, 1.0, range(1), 1, holds_bytes=5, scratch_bytes=2),
        Task(0, SpanKind.BACKWARD, 1.0, range(1), 0, frees_bytes=5, scratch_bytes=3),
        Task(0, SpanKind.FORWARD, 1.0, range(1), 2, holds_bytes=4, frees_bytes=9),
        Task(1, SpanKind.FORWARD, 1.0, range(1), 2, scratch_bytes=7),
    ]
    assert simulate(tasks, 3).peak_bytes() == (13, 7, 0)


def test_a_trace_has_each_task_on_its_device_at_its_time_in_microseconds():
    costs = Costs(tuple(LayerCost(f"{i}", 0.001, 0.002, optimizer_s=0.0005) for i in range(3)), hop_s=0.0001)
    tasks = dispatch_tasks(Partition((2,), 1, (1, 1)), costs, 2, 3, 1, update="async", steps=2)
    line = simulate(tasks, 2)
    events = json.loads(json.dumps(trace_events([("first", line), ("second", line)])))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    expected = [
        (start_s * 1e6, task.duration_s * 1e6, task.micro_batch, task.step + 1)
        for task, start_s in zip(tasks, line.start_s, strict=True)
    ]
    shown = [(event["ts"], event["dur"], event["args"]["micro_batch"], event["args"]["step"]) for event in spans]
    assert shown == 2 * expected
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = [f"{name}: {row}" for name in ("first", "second") for row in ("device 0", "device 1", "optimizer")]
    assert sorted(names.values()) == sorted(rows) and {event["pid"] for event in spans} == set(names)
    assert {"F 0-1", "FB 2", "R 1", "B 1", "B 0", "update 2"} <= {event["name"] for event in spans}

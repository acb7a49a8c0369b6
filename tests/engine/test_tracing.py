"""A trace holds every stage slot, transfer and update of a step and its neighbours, in the simulator's own types."""

import json
import threading
from collections import Counter
from itertools import pairwise

import pytest

from tests.support.optimizers import OPTIMIZERS
from tests.support.toy import KEPT, OPTIMIZER, PARTITIONS, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.config import TraceTable
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.engine.timeline import COMPUTE, HOST, TaskKind, label
from torchround.engine.tracing import StepTraces
from torchround.optim import make_optimizer

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)
GRADIENTS = 48_128  # bytes of all gradients of a step
TRACED = 1  # counted from 0: the second step


class KeptTraces(StepTraces):
    """Traces that keep the timelines that they write."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.written = []

    def timeline(self, step):
        self.written.append(super().timeline(step))
        return self.written[-1]


def train_traced(
    num_devices,
    folder,
    policy=SYNC,
    validates=False,
    kept=(),
    optimizer=OPTIMIZER,
    held=None,
    steps=(TRACED + 1,),
    profiler=False,
):
    """Train as a run does, one step dispatched ahead, with `steps` traced. Returns the first one's timeline and the store.

    With `validates`, an evaluation runs before each step. `held` is a watcher. The traced step's update waits for a save,
    which waits until `held` has seen what it waits for.
    """
    model = toy_model()
    store = toy_store(model, policy=policy, optimizer=make_optimizer(optimizer))
    devices = [CpuDevice(index) for index in range(num_devices)]
    traces = KeptTraces(TraceTable(steps=steps, profiler=profiler), folder, devices, total_steps=len(BATCHES))
    under_way = []
    settings = EngineSettings(kept=kept)
    with Engine(model, store, devices, PARTITION, optimizer=optimizer, settings=settings) as engine:
        traces.start()
        for device in devices if held else ():
            device.watchers.append(held)
        for step, micro_batches in enumerate(BATCHES):
            if held and step == TRACED:
                engine.save(lambda source: held.seen.wait(20.0)).may_publish()
            if validates:
                engine.evaluate(micro_batches)
            traces.before_dispatch(step + 1)
            under_way.append(engine.forward_backward(micro_batches))
            engine.step(1e-2)
            if step > 0:
                done = under_way.pop(0)
                done.collect()
                traces.add(done)
        under_way[0].collect()
        traces.add(under_way[0])
        traces.finish()
    assert len(traces.written) == len(steps)
    return traces.written[0], store


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The timeline and the store of each mode on two devices."""
    return {policy: train_traced(2, tmp_path_factory.mktemp("plain"), policy) for policy in (SYNC, ASYNC)}


def own(timeline):
    """The traced step's tasks, each with its start and end."""
    spans = zip(timeline.tasks, timeline.start_s, timeline.end_s, strict=True)
    return [(task, start, end) for task, start, end in spans if task.step == TRACED]


def moved_bytes(timeline):
    moved = Counter()
    for task, _, _ in own(timeline):
        moved[task.kind] += task.moves_bytes
    return moved


def one_at_a_time(timeline, num_devices):
    orders = [timeline.of_device(device) for device in range(num_devices)]
    return all(timeline.end_s[a] <= timeline.start_s[b] for order in orders for a, b in pairwise(order))


def test_a_trace_holds_every_computation_once_and_those_of_a_device_one_after_the_other(plain):
    timeline, _ = plain[SYNC]
    computed = Counter(
        (task.kind, layer, task.micro_batch)
        for task, _, _ in own(timeline)
        for layer in task.layers
        if task.stream == COMPUTE and task.device != HOST
    )
    expected = Counter()
    for stage in PARTITION.stages():
        kinds = [TaskKind(stage.kind.value)]
        if kinds == [TaskKind.BACKWARD]:
            kinds = [TaskKind.RECOMPUTE, TaskKind.BACKWARD]
        layers = range(stage.start, stage.stop)
        expected.update((kind, layer, m) for kind in kinds for layer in layers for m in range(4))
    assert computed == expected and one_at_a_time(timeline, 2)
    landed = max(end for task, _, end in own(timeline) if task.kind is TaskKind.GRADIENTS)
    assert min(start for task, start, _ in own(timeline) if task.kind is TaskKind.UPDATE) >= landed


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_trace_holds_all_bytes_moved_and_an_update_of_each_layer(plain, policy):
    """Weights that went up during the step before, for this one, are this one's."""
    timeline, store = plain[policy]
    moved = moved_bytes(timeline)
    whole = sum(bundle.numel for bundle in store.bundles) * 4
    head = sum(bundle.numel for bundle in store.layer_bundles(6)) * 4
    assert (moved[TaskKind.WEIGHTS], moved[TaskKind.GRADIENTS]) == (2 * whole - head, whole)
    updates = [task.layers.start for task, _, _ in own(timeline) if task.kind is TaskKind.UPDATE]
    assert updates == list(range(7))


def test_a_trace_shows_kept_activations_on_their_way_to_the_host_and_back(plain, tmp_path):
    timeline, _ = train_traced(2, tmp_path, kept=KEPT["all"])
    moved, without = moved_bytes(timeline), moved_bytes(plain[SYNC][0])
    work = toy_model().layers[1].work(1, 8, 4)
    for kind in (TaskKind.OFFLOAD, TaskKind.RELOAD):
        # Nine sequences of eight tokens through five blocks, all of them before the fused stage.
        assert moved[kind] - without[kind] == 9 * 5 * sum(part.nbytes for part in work.keepable)


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_trace_shows_the_directions_of_muon_on_the_devices_whose_turn_it_is(plain, tmp_path, policy):
    """One span for each block, the deepest first; look-aheads go up and directions come down in two bytes each."""
    timeline, store = train_traced(2, tmp_path, policy, optimizer=OPTIMIZERS["muon"])
    directions = [found for found in own(timeline) if found[0].kind is TaskKind.ORTHOGONALISE]
    spans = {task.layers.start: (task, start, end) for task, start, end in directions}
    assert len(directions) == len(spans)
    assert [label(spans[layer][0]) for layer in (5, 4, 3, 2, 1)] == ["O 5", "O 4", "O 3", "O 2", "O 1"]
    first = spans[5][0].device
    assert all(task.device == (first + 5 - layer) % 2 for layer, (task, _, _) in spans.items())
    # In sync the jobs follow the step's own tasks; in async as many free slots as devices are in each step's tasks.
    tasks = len(PARTITION.stages())
    skipped = 2 if policy is ASYNC else 0
    assert first == ((TRACED + 1) * tasks + TRACED * skipped + (len(PARTITION.forward) if skipped else 0)) % 2
    assert all(task.stream == COMPUTE and start < end for task, start, end in spans.values())
    segments = [segment for bundle in store.bundles for segment in bundle.segments]
    matrices = sum(segment.numel for segment in segments if segment.direction is not None)
    moved, without = moved_bytes(timeline), moved_bytes(plain[policy][0])
    for kind in (TaskKind.RELOAD, TaskKind.GRADIENTS):
        assert moved[kind] - without[kind] == 2 * matrices
    updates = min(start for task, start, _ in own(timeline) if task.kind is TaskKind.UPDATE)
    assert max(end for _, _, end in spans.values()) <= updates and one_at_a_time(timeline, 2)


def test_the_copies_of_an_evaluation_are_in_no_steps_trace(plain, tmp_path):
    timeline, _ = train_traced(2, tmp_path, validates=True)
    assert moved_bytes(timeline) == moved_bytes(plain[SYNC][0])


def test_a_profile_of_neighbouring_steps_is_one_file_with_the_operators_of_the_workers_threads(tmp_path):
    train_traced(2, tmp_path, steps=(2, 3), profiler=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2.json", "step-3-profiler.json", "step-3.json"]
    events = json.loads((tmp_path / "step-3-profiler.json").read_text())["traceEvents"]
    threads = {event["tid"] for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::mm"}
    assert len(threads) > 1


def test_a_profiler_that_cannot_record_all_threads_is_used_without_them_with_a_warning(tmp_path, monkeypatch, caplog):
    """As in PyTorch 2.11, whose settings lack the one for all threads."""
    monkeypatch.setattr("torch._C._profiler._ExperimentalConfig", lambda: None)
    train_traced(1, tmp_path, profiler=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2-profiler.json", "step-2.json"]
    assert "no operators of the devices' threads" in caplog.text


class NextStepComputes(Observer):
    """Says when a device has computed something of the step after the traced one."""

    def __init__(self):
        self.seen = threading.Event()

    def ends(self, device, stream, copied_bytes):
        if stream is Stream.COMPUTE and device.step_of[stream] == TRACED + 1:
            self.seen.set()


def test_an_async_trace_shows_the_next_step_computing_before_this_ones_update(tmp_path):
    """The update is held back until the next step computes: a drained engine would never get there."""
    watcher = NextStepComputes()
    timeline, _ = train_traced(2, tmp_path, ASYNC, held=watcher)
    assert watcher.seen.is_set(), "the next step waits for this one's update"
    spans = zip(timeline.tasks, timeline.start_s, strict=True)
    next_s = min(start for task, start in spans if task.step == TRACED + 1 and task.stream == COMPUTE)
    updated_s = min(start for task, start, _ in own(timeline) if task.kind is TaskKind.UPDATE)
    assert next_s < updated_s


class TracedStepComputes(Observer):
    """Holds the last gradients of the step before the traced one, which computes meanwhile."""

    def __init__(self):
        self.seen, self.left, self.lock = threading.Event(), GRADIENTS, threading.Lock()

    def begins(self, device, stream, reads, writes, copied_bytes):
        if stream is Stream.GRADIENT_DOWNLOAD and device.step_of[stream] == TRACED - 1:
            with self.lock:
                self.left -= copied_bytes
                is_last = not self.left
            assert not is_last or self.seen.wait(20.0)

    def ends(self, device, stream, copied_bytes):
        if stream is Stream.COMPUTE and device.step_of[stream] == TRACED:
            self.seen.set()


def test_a_trace_shows_copies_of_the_step_before_that_overlap_it(tmp_path):
    timeline, _ = train_traced(2, tmp_path, ASYNC, held=TracedStepComputes())
    assert TaskKind.GRADIENTS in {task.kind for task in timeline.tasks if task.step == TRACED - 1}


def test_a_trace_that_was_written_at_an_engine_s_end_stays_as_it_is(tmp_path):
    """A run that measures its plan goes on with another engine."""
    model, device = toy_model(), CpuDevice(0)
    store = toy_store(model)
    traces, files = StepTraces(TraceTable(steps=(1,)), tmp_path, [device], total_steps=2), []
    for step, micro_batches in enumerate(BATCHES[:2]):
        with Engine(model, store, [device], PARTITION, optimizer=OPTIMIZER) as engine:
            traces.start()
            traces.before_dispatch(step + 1)
            result = engine.forward_backward(micro_batches)
            engine.step(1e-2)
            result.collect()
            traces.add(result)
        traces.finish()
        files.append((tmp_path / "step-1.json").read_text())
    assert files[0] == files[1]


def test_a_trace_has_the_steps_before_and_after_too_and_begins_at_0(plain):
    timeline, _ = plain[ASYNC]
    assert {task.step for task in timeline.tasks} == {TRACED - 1, TRACED, TRACED + 1}
    assert min(timeline.start_s) == 0.0


@pytest.mark.parametrize("steps", [(2, 3), (1, 2, 3, 4)], ids=str)
def test_each_traced_step_has_its_file_with_all_of_its_updates_and_tracing_changes_no_bit(tmp_path, plain, steps):
    _, store = train_traced(2, tmp_path, steps=steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}.json" for step in steps]
    for step in steps:
        events = json.loads((tmp_path / f"step-{step}.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert all(event["ts"] >= 0 and event["dur"] > 0 for event in spans)
        kinds = [event["cat"] for event in spans if event["args"]["step"] == step]
        assert kinds.count("update") == 7 and kinds.count("weights") > 0 and kinds.count("gradients") > 0
    untraced = toy_store(toy_model())
    with Engine(toy_model(), untraced, [CpuDevice(0)], PARTITION, optimizer=OPTIMIZER) as engine:
        train(engine, BATCHES)
    assert_same_state(store.named_views(), untraced.named_views())
    assert_same_state(plain[SYNC][1].named_views(), untraced.named_views())


def test_traces_of_an_engine_that_fails_stop_the_profiler_and_keep_no_copies(tmp_path):
    model = toy_model()
    devices = [CpuDevice(0)]
    traces = StepTraces(TraceTable(steps=(2,), profiler=True), tmp_path, devices, total_steps=4)
    with Engine(model, toy_store(model), devices, PARTITION, optimizer=OPTIMIZER) as engine:
        traces.start()
        for step in (1, 2):
            engine.evaluate(BATCHES[0])
            traces.before_dispatch(step)
            done = engine.forward_backward(BATCHES[0])
            engine.step(1e-2)
            done.collect()
        assert set(traces._copies) == {0, 1}
    traces.finish()
    assert traces._profile is None and not traces._copies
    assert [path.name for path in tmp_path.iterdir()] == ["step-2-profiler.json"]


def test_copies_of_steps_that_no_trace_needs_are_forgotten(tmp_path):
    model = toy_model()
    devices = [CpuDevice(0)]
    traces = StepTraces(TraceTable(steps=(1,)), tmp_path, devices, total_steps=4)
    with Engine(model, toy_store(model), devices, PARTITION, optimizer=OPTIMIZER) as engine:
        traces.start()
        for step, micro_batches in enumerate(BATCHES + BATCHES):
            traces.before_dispatch(step + 1)
            done = engine.forward_backward(micro_batches)
            engine.step(1e-2)
            done.collect()
            traces.add(done)
        assert not traces._copies

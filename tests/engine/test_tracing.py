"""A trace holds every stage slot, transfer and update of steps in a row."""

import json
import threading
import time
from collections import Counter
from itertools import pairwise

import pytest

from tests.support.optimizers import OPTIMIZERS
from tests.support.toy import KEPT, OPTIMIZER, PARTITIONS, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.config import TraceTable
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.tracing import StepTraces
from torchround.optim import make_optimizer
from torchround.planning.update_modes import ASYNC, SYNC

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=3)
GRADIENTS = 48_128  # bytes of all gradients of a step
TRACED = 1  # counted from 0: the second step


def train_traced(
    num_devices,
    folder,
    mode=SYNC,
    validates=False,
    kept=(),
    optimizer=OPTIMIZER,
    held=None,
    steps=(TRACED + 1,),
    profiler=False,
):
    """The traced step's update waits for a save, which waits until the watcher `held` has seen what it waits for."""
    model = toy_model()
    store = toy_store(model, mode=mode, optimizer=make_optimizer(optimizer))
    devices = [CpuDevice(index) for index in range(num_devices)]
    traces = StepTraces(TraceTable(steps=steps, profiler=profiler), folder, devices, total_steps=len(BATCHES))
    under_way = []
    settings = EngineSettings(kept=kept)
    with Engine(model, store, devices, PARTITION, optimizer=optimizer, settings=settings) as engine:
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
    return spans_in(folder / f"step-{steps[-1]}.json"), store


def spans_in(path):
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for span in spans:
        first, _, last = span["name"].partition(" ")[2].partition("-")
        span["layers"] = range(int(first), int(last or first) + 1) if first else range(0)
        span["start"], span["end"] = span["ts"], span["ts"] + span["dur"]
        span["step"] = span["args"]["step"] - 1
    return spans


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return {mode: train_traced(2, tmp_path_factory.mktemp("plain"), mode) for mode in (SYNC, ASYNC)}


def own(spans, kind=None):
    return [span for span in spans if span["step"] == TRACED and kind in (None, span["cat"])]


def moved_bytes(spans):
    moved = Counter()
    for span in own(spans):
        moved[span["cat"]] += span["args"]["moved_bytes"]
    return moved


def computations(spans, device):
    mine = [span for span in spans if span["pid"] == device and span["tid"] == 0]
    return sorted(mine, key=lambda span: span["start"])


def one_at_a_time(spans, num_devices):
    orders = [computations(spans, device) for device in range(num_devices)]
    # Microseconds since the host's start have a rounding error.
    return all(a["end"] <= b["start"] + 1e-2 for order in orders for a, b in pairwise(order))


def test_a_trace_holds_every_computation_once_and_those_of_a_device_one_after_the_other(plain):
    spans, _ = plain[SYNC]
    computed = Counter(
        (span["cat"], layer, span["args"]["micro_batch"])
        for device in range(2)
        for span in own(computations(spans, device))
        for layer in span["layers"]
    )
    expected = Counter()
    for stage in PARTITION.stages():
        kinds = ["recompute", "backward"] if stage.kind.value == "backward" else [stage.kind.value]
        layers = range(stage.start, stage.stop)
        expected.update((kind, layer, m) for kind in kinds for layer in layers for m in range(3))
    assert computed == expected and one_at_a_time(spans, 2)
    landed = max(span["end"] for span in own(spans, "gradients"))
    assert min(span["start"] for span in own(spans, "update")) >= landed


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
def test_a_trace_holds_all_bytes_moved_and_an_update_of_each_layer(plain, mode):
    """Weights that went up during the step before, for this one, are this one's."""
    spans, store = plain[mode]
    moved = moved_bytes(spans)
    whole = sum(bundle.numel for bundle in store.bundles) * 4
    head = sum(bundle.numel for bundle in store.layer_bundles(6)) * 4
    assert (moved["weights"], moved["gradients"]) == (2 * whole - head, whole)
    assert [span["layers"].start for span in own(spans, "update")] == list(range(7))


def test_a_trace_shows_kept_activations_on_their_way_to_the_host_and_back(plain, tmp_path):
    spans, _ = train_traced(2, tmp_path, kept=KEPT["all"])
    moved, without = moved_bytes(spans), moved_bytes(plain[SYNC][0])
    work = toy_model().layers[1].work(1, 8, 4)
    for kind in ("offload", "reload"):
        # Seven sequences of eight tokens through five blocks, all of them before the fused stage.
        assert moved[kind] - without[kind] == 7 * 5 * sum(part.nbytes for part in work.keepable)


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
def test_a_trace_shows_the_directions_of_muon_on_the_devices_whose_turn_it_is(plain, tmp_path, mode):
    """One span for each block, the deepest first; look-aheads go up and directions come down in two bytes each."""
    spans, store = train_traced(2, tmp_path, mode, optimizer=OPTIMIZERS["muon"])
    directions = own(spans, "orthogonalise")
    by_layer = {span["layers"].start: span for span in directions}
    assert len(directions) == len(by_layer)
    assert all(by_layer[layer]["name"] == f"orthogonalise {layer}" for layer in (5, 4, 3, 2, 1))
    first = by_layer[5]["pid"]
    assert all(span["pid"] == (first + 5 - layer) % 2 for layer, span in by_layer.items())
    # In sync the jobs follow the step's own tasks; in async as many free slots as devices are in each step's tasks.
    tasks = len(PARTITION.stages())
    skipped = 2 if mode is ASYNC else 0
    assert first == ((TRACED + 1) * tasks + TRACED * skipped + (len(PARTITION.forward) if skipped else 0)) % 2
    assert all(span["tid"] == 0 and span["start"] < span["end"] for span in directions)
    segments = [segment for bundle in store.bundles for segment in bundle.segments]
    matrices = sum(segment.numel for segment in segments if segment.direction is not None)
    moved, without = moved_bytes(spans), moved_bytes(plain[mode][0])
    for kind in ("reload", "gradients"):
        assert moved[kind] - without[kind] == 2 * matrices
    updates = min(span["start"] for span in own(spans, "update"))
    assert max(span["end"] for span in directions) <= updates and one_at_a_time(spans, 2)


def test_the_copies_of_an_evaluation_are_in_no_steps_trace(plain, tmp_path):
    spans, _ = train_traced(2, tmp_path, validates=True)
    assert moved_bytes(spans) == moved_bytes(plain[SYNC][0])


def test_a_profile_of_neighbouring_steps_is_one_file_with_the_operators_of_the_workers_threads(tmp_path):
    train_traced(2, tmp_path, steps=(2, 3), profiler=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3-profiler.json", "step-3.json"]
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
    def __init__(self):
        self.seen = threading.Event()

    def ends(self, device, stream, copied_bytes):
        if stream is Stream.COMPUTE and device.step_of[stream] == TRACED + 1:
            self.seen.set()


def test_an_async_trace_shows_the_next_step_computing_before_this_ones_update(tmp_path):
    """The update is held back until the next step computes: a drained engine would never get there."""
    watcher = NextStepComputes()
    spans, _ = train_traced(2, tmp_path, ASYNC, held=watcher, steps=(2, 3))
    assert watcher.seen.is_set(), "the next step waits for this one's update"
    computed = [*computations(spans, 0), *computations(spans, 1)]
    next_us = min(span["start"] for span in computed if span["step"] == TRACED + 1)
    assert next_us < min(span["start"] for span in own(spans, "update"))


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
    spans, _ = train_traced(2, tmp_path, ASYNC, held=TracedStepComputes(), steps=(1, 2))
    assert "gradients" in {span["cat"] for span in spans if span["step"] == TRACED - 1}


def traced_steps(traces, devices, store, steps, collects=True, evaluates=False):
    with Engine(toy_model(), store, devices, PARTITION, optimizer=OPTIMIZER) as engine:
        for step in steps:
            if evaluates:
                engine.evaluate(BATCHES[0])
            traces.before_dispatch(step)
            done = engine.forward_backward(BATCHES[step - 1])
            engine.step(1e-2)
            done.collect()
            if collects:
                traces.add(done)


def test_a_trace_that_was_written_at_an_engine_s_end_stays_as_it_is(tmp_path):
    """A run that measures its plan goes on with another engine."""
    store, devices = toy_store(toy_model()), [CpuDevice(0)]
    traces, files = StepTraces(TraceTable(steps=(1,)), tmp_path, devices, total_steps=2), []
    for step in (1, 2):
        traced_steps(traces, devices, store, [step])
        traces.finish()
        files.append((tmp_path / "step-1.json").read_text())
    assert files[0] == files[1]


@pytest.mark.parametrize("rows", [((2, 3),), ((1,), (3, 4))], ids=str)
def test_steps_in_a_row_share_a_file_with_all_of_their_updates_and_tracing_changes_no_bit(tmp_path, plain, rows):
    begin_us = time.perf_counter() * 1e6
    _, store = train_traced(2, tmp_path, steps=tuple(step for row in rows for step in row))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{row[-1]}.json" for row in rows]
    for row in rows:
        spans = spans_in(tmp_path / f"step-{row[-1]}.json")
        assert all(begin_us < span["ts"] < time.perf_counter() * 1e6 and span["dur"] > 0 for span in spans)
        assert {span["args"]["step"] for span in spans} == set(row)
        kinds = Counter(span["cat"] for span in spans)
        assert kinds["update"] == 7 * len(row) and kinds["weights"] > 0 and kinds["gradients"] > 0
    untraced = toy_store(toy_model())
    with Engine(toy_model(), untraced, [CpuDevice(0)], PARTITION, optimizer=OPTIMIZER) as engine:
        train(engine, BATCHES)
    assert_same_state(store.named_views(), untraced.named_views())
    assert_same_state(plain[SYNC][1].named_views(), untraced.named_views())


def test_traces_of_an_engine_that_fails_are_its_profile_alone(tmp_path):
    devices = [CpuDevice(0)]
    traces = StepTraces(TraceTable(steps=(2,), profiler=True), tmp_path, devices, total_steps=4)
    traced_steps(traces, devices, toy_store(toy_model()), (1, 2), collects=False, evaluates=True)
    assert set(devices[0].copies) == {1}
    traces.finish()
    assert traces._profile is None and [path.name for path in tmp_path.iterdir()] == ["step-2-profiler.json"]


def test_copies_of_steps_that_no_trace_needs_are_not_remembered(tmp_path):
    devices = [CpuDevice(0)]
    traces = StepTraces(TraceTable(steps=(1,)), tmp_path, devices, total_steps=4)
    traced_steps(traces, devices, toy_store(toy_model()), range(1, 5))
    assert not devices[0].copies

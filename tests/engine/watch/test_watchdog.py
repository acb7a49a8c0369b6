"""The watchdog tells a hang from work, reports what every thread and device queue waits for, and no thread is left.

A planted hang waits for an event, not for a time, and the watchdog looks only after the hang has begun. So on
a slow machine too, the planted hang is the first one found, and all other threads have the time-out to halt.
"""

import re
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from tests.support import toy
from tests.support.planted_hangs import over, planted
from tests.support.toy import (
    PARTITIONS,
    ToyBlock,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine import lifecycle
from torchround.engine.board import Board, HandOver
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.errors import HangError
from torchround.engine.ordering import GRADIENT_LANDED, UPLOADED, WEIGHTS
from torchround.engine.passes import STAGE_JOB, TRAINING_PASS
from torchround.engine.results import STAGE_ENQUEUED
from torchround.engine.update_report import LEARNING_RATE, UPDATED
from torchround.engine.watch.watchdog import LOOKS, QueueWatch, Watchdog
from torchround.engine.worker.activation_transfers import BOUNDARY, BOUNDARY_GRADIENT, LOSS
from torchround.engine.worker.kept_transfers import KEPT

__all__ = ["over", "planted"]

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=3)
TIMEOUT_S = 0.4


@pytest.fixture(scope="module", autouse=True)
def undisturbed():
    """Return the state after three steps, made first because a process's first step imports parts of torch."""
    store = toy_store(toy_model())
    with toy_engine(toy_model(), store, PARTITION, 1) as engine:
        train(engine, BATCHES)
    return store.named_views()


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchround")]


def hanging_engine(store=None, num_devices=2, **options):
    model = toy_model()
    return toy_engine(model, store or toy_store(model), PARTITION, num_devices, hang_timeout_s=TIMEOUT_S, **options)


def hang(engine):
    """Return the error of three steps and of the questions after them. Ends the engine in any case."""
    try:
        with pytest.raises(HangError) as raised:
            for micro_batches in BATCHES:
                result = engine.forward_backward(micro_batches)
                engine.step(1e-2)
            result.update()
            engine.drain()
    finally:
        engine.close()
    return raised.value


def block_forwards(monkeypatch, planted, over, call):
    """Let the blocks' `call`-th forward of the run end only with the test."""
    forward, lock, calls = ToyBlock.forward, threading.Lock(), [0]

    def blocking(self, hidden, micro_batch):
        with lock:
            calls[0] += 1
            blocks = calls[0] == call
        if blocks:
            planted.set()
            over.wait()
        return forward(self, hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", blocking)


# A step makes 15 forwards of blocks in forward stages, then 15 recomputations of blocks.
@pytest.mark.parametrize(("call", "stage", "step"), [(1, "forward", 0), (20, "backward", 0), (59, "backward", 1)])
def test_a_layer_that_blocks_is_reported_with_what_all_others_wait_for(monkeypatch, planted, over, call, stage, step):
    monkeypatch.setattr(lifecycle, "JOIN_S", 0.1)
    block_forwards(monkeypatch, planted, over, call)
    store = toy_store(toy_model())
    error = hang(hanging_engine(store))
    caller, *lines = error.report
    assert re.fullmatch(r"MainThread \(the call in progress\): waits for .+", caller)
    assert sum(line.startswith("torchround cpu:") for line in lines) == 2
    [stuck] = [line for line in lines if ", in wait" in line or "is in wait" in line]
    place = rf"in device cpu:\d, {stage} stage \(.*block\.\d.*\), micro-batch \d"
    assert re.match(rf"torchround cpu:\d: {place}: is in wait .* called by .*blocking \(.*test_watchdog", stuck)
    [queue] = [line for line in lines if line.startswith("  its ")]
    assert re.match(rf"  its compute queue is inside an operation of {place[3:]}", queue)
    gradient = rf"torchround optimizer: waits for part 0 of step {step}'s gradient of bundle \d"
    assert any(re.match(gradient, line) for line in lines)
    assert str(error).startswith("controller: nothing moved for 0.4 s.")
    assert "still inside a computation" in str(error), "the message says which thread could not be ended"
    assert store.step == step and store.is_consistent


@pytest.mark.parametrize(
    ("kind", "waiting"),
    [
        (BOUNDARY, r"torchround cpu:\d: .*waits for the input of layer \d for micro-batch 1 of pass 1"),
        (
            BOUNDARY_GRADIENT,
            r"torchround cpu:\d: .*waits for the gradient of layer \d's input for micro-batch 1 of pass 1",
        ),
        (KEPT, r"torchround cpu:\d: .*waits for the kept activations of layer 1 for micro-batch 0 of pass 1"),
        (LOSS, r"torchround optimizer: waits for the loss of micro-batch 1 of pass 1"),
        (GRADIENT_LANDED, r"torchround optimizer: waits for part 0 of step 1's gradient of bundle 1 "),
        (WEIGHTS, r"torchround cpu:\d: .*waits for version 1 of bundle 1 \(ordering rule 2"),
        (UPLOADED, r"torchround optimizer: waits for upload \d+ of version 1 of bundle 1 \(ordering rule 1"),
        (STAGE_ENQUEUED, r"MainThread .*: waits for all of stage slot 12 to be enqueued"),
        (UPDATED, r"MainThread .*: waits for the update of step 2"),
        (TRAINING_PASS, r"torchround optimizer: waits for step 1 to be dispatched"),
        (LEARNING_RATE, r"torchround optimizer: waits for the learning rate of step 1"),
        (STAGE_JOB, r"torchround cpu:0: in device cpu:0: waits for stage slot 12 to be handed out"),
    ],
    ids=lambda value: value.words if isinstance(value, HandOver) else "",
)
def test_a_hand_over_that_is_lost_is_named_and_every_thread_ends(monkeypatch, planted, undisturbed, kind, waiting):
    """Lose one hand-over of each kind: the first of the second step that concerns bundle 1 or micro-batch 1."""
    post, wait, lost, waited = Board.post, Board.wait, [], []

    def losing(self, key, value):
        number = {STAGE_JOB: 12, STAGE_ENQUEUED: 12, UPDATED: 2}.get(kind, 1)
        mine = key.kind is kind and key.number == number and (not key.key or 1 in (key.key[0], key.key[-1]))
        if mine and not lost:
            lost.append(key)
            if key in waited:
                planted.set()
        else:
            post(self, key, value)

    def waiting_for_it(self, key, *arguments):
        waited.append(key)
        if key in lost:
            planted.set()
        return wait(self, key, *arguments)

    monkeypatch.setattr(Board, "post", losing)
    monkeypatch.setattr(Board, "wait", waiting_for_it)
    store = toy_store(toy_model())
    kept = toy.KEPT["all"] if kind is KEPT else ()
    error = hang(hanging_engine(store, kept=kept))
    assert lost and any(re.match(waiting, line) for line in error.report), (lost, error.report)
    assert engine_threads() == []
    assert store.is_consistent
    monkeypatch.undo()
    left = store.step
    with toy_engine(toy_model(), store, PARTITION, 3) as engine:
        train(engine, BATCHES[left:])
    assert_same_state(store.named_views(), undisturbed)


class StuckEvent:
    """A point that a device passes when the test allows it. `planted` is set when a thread waits for it."""

    def __init__(self, over, planted):
        self._over, self._planted = over, planted

    def synchronize(self):
        self._planted.set()
        self._over.wait()

    def query(self):
        if threading.current_thread() is threading.main_thread():
            self._planted.set()
        return self._over.is_set()


class StuckDevice(CpuDevice):
    """A device like a GPU whose queue `stream` stops at its `after`-th event while its thread still enqueues."""

    def __init__(self, index, stream, after, over, planted):
        super().__init__(index)
        self._stuck, self._left, self._over, self._planted = stream, after, over, planted

    def _record(self, stream):
        if stream is self._stuck:
            self._left -= 1
            if self._left < 0:
                return StuckEvent(self._over, self._planted)
        return super()._record(stream)

    def _wait(self, stream, event):
        pass  # like a GPU, enqueues the wait and returns

    def finish(self):
        self._over.wait()


@pytest.mark.parametrize(
    "stream", [Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_DOWNLOAD, Stream.GRADIENT_DOWNLOAD, Stream.COMPUTE]
)
def test_a_device_queue_that_stands_still_is_named_with_its_first_unfinished_event(monkeypatch, planted, over, stream):
    """The caller waits for the device itself, or for the optimizer, which waits for the device."""
    monkeypatch.setattr(lifecycle, "JOIN_S", 0.1)

    def stuck(device):
        return StuckDevice(0, stream, 2, over, planted) if device.name == "cpu:0" else device

    engine = hanging_engine(wrap=stuck)
    if stream is Stream.COMPUTE:  # only the end of the engine waits for it
        result = engine.forward_backward(BATCHES[0])
        engine.step(1e-2)
        result.collect()
        with pytest.raises(HangError) as raised, engine._life.call():
            engine._synchronize(StuckEvent(over, planted))
        error = raised.value
        assert error.report[0] == "MainThread (the call in progress): waits for a device"
    else:
        error = hang(engine)
    [line] = [line for line in error.report if line.startswith(f"  its {stream.value} queue")]
    stage = r"device cpu:0, \w+ stage \(.*\)"
    assert re.match(rf"  its {stream.value} queue has not passed \d+ event\(s\), the first one of {stage}", line)


@pytest.mark.parametrize("call", ["loss", "update", "drain", "forward_backward", "evaluate"])
def test_every_call_that_waits_ends_with_the_report_and_so_does_each_later_one(monkeypatch, planted, over, call):
    monkeypatch.setattr(lifecycle, "JOIN_S", 0.1)
    block_forwards(monkeypatch, planted, over, call=1)
    engine = hanging_engine()
    result = engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    calls = {
        "loss": result.loss,
        "update": result.update,
        "drain": engine.drain,
        "forward_backward": lambda: train(engine, BATCHES[:2]),
        "evaluate": lambda: [engine.evaluate(BATCHES[0]) for _ in range(2)],
    }
    for _ in range(2):
        with pytest.raises(HangError):
            calls[call]()


def test_one_thing_that_moves_between_two_looks_is_enough(monkeypatch):
    board, hangs, device = Board(), [], CpuDevice(0)
    watchdog = Watchdog(board, [], [QueueWatch(device, lambda: None)], [], 1e9, hangs.append)

    def look_while(*moves):
        for move in moves:
            for _ in range(LOOKS):
                watchdog._look()
            move()

    memory = device.allocate(1)
    look_while(
        lambda: board.post(LEARNING_RATE(0), 1e-2),
        board.note_progress,
        lambda: device.run(Stream.COMPUTE, memory.zero_),
        lambda: device.copy(Stream.WEIGHT_UPLOAD, memory, memory),
        lambda: device.record(Stream.COMPUTE),
    )
    assert hangs == []


def test_events_that_a_device_passes_count_as_movement():
    """A thread that has enqueued everything is silent while its device still works."""
    passed = threading.Event()

    class Later(CpuDevice):
        def _record(self, stream):
            return StuckEvent(passed, threading.Event())

    device = Later(0)
    queues = QueueWatch(device, lambda: None)
    device.record(Stream.COMPUTE)
    before = queues.moves()
    assert Stream.COMPUTE in queues.unfinished() and queues.moves() == before
    passed.set()
    assert queues.moves() == before + 1 and queues.unfinished() == {}


def test_the_thread_that_launches_kernels_asks_for_few_of_its_events():
    """Each question is a call of the driver. No event may be missed, and those that wait stay few."""
    asked, passed = [0], [0]

    class Numbered(CpuDevice):
        recorded = 0

        def _record(self, stream):
            self.recorded += 1
            return SimpleNamespace(query=partial(self.query, self.recorded))

        def query(self, number):
            asked[0] += 1
            return number <= passed[0]

    device = Numbered(0)
    queues = QueueWatch(device, lambda: None)
    for number in range(1000):
        passed[0] = max(0, number - 10)
        device.record(Stream.COMPUTE)
    assert 0 < asked[0] < 200
    before = queues.moves()
    passed[0] = 1000
    assert before == 989 and queues.moves() == 1000 and queues.unfinished() == {}


def test_a_look_that_comes_late_because_the_whole_process_stood_still_is_one_look():
    """A process that was stopped for longer than the time-out therefore continues."""
    hangs = []
    watchdog = Watchdog(Board(), [], [], [], 1e-9, hangs.append)
    for _ in range(LOOKS):
        watchdog._look()
    assert not hangs
    watchdog._look()
    assert len(hangs) == 1

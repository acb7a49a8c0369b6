"""The watchdog tells a hang from work, reports what every thread and device queue waits for, and no thread is left.

A planted hang waits for an event, not for a time, and the watchdog looks only after the hang has begun. So on
a slow machine too, the planted hang is the first one found, and all other threads have the time-out to halt.
"""

import gc
import itertools
import re
import threading
from types import SimpleNamespace

import pytest

from tests.support import toy
from tests.support.faults import LANDED, UPLOADED, WRITTEN, engine_threads, kind_of, lose, this_thread
from tests.support.toy import planted_model, toy_batches, toy_engine, toy_model, toy_store, train, watched
from torchround.engine.board import LOOKS, Board, Observer, Value, Watchdog
from torchround.engine.device import PASSED, CpuDevice, Stream
from torchround.engine.errors import HangError
from torchround.engine.passes import BOUNDARY, BOUNDARY_GRADIENT, KEPT, LOSS, STAGE_ENQUEUED, UPDATED, Pass
from torchround.engine.tasks import Access
from torchround.engine.worker.device_worker import STAGE_JOB

PARTITION = toy.PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=3)


@pytest.fixture(scope="module", autouse=True)
def undisturbed():
    """Return the state after three steps, made first because a process's first step imports parts of torch."""
    with toy_engine(PARTITION, 1) as engine:
        train(engine, BATCHES)
    return engine.store.named_views()


@pytest.fixture
def stuck(brief_joins, over):
    return over


def hanging_engine(store=None, model=None, **options):
    return toy_engine(PARTITION, 2, model=model, store=store, hang_timeout_s=0.4, **options)


def hang(engine, question="update"):
    try:
        with pytest.raises(HangError) as raised:
            for micro_batches in BATCHES:
                result = engine.forward_backward(micro_batches)
                engine.step(1e-2)
            getattr(result, question)()
            engine.drain()
    finally:
        engine.close()
    return raised.value


def blocking_model(planted, over, call):
    calls = itertools.count(1)

    def blocking(hidden, micro_batch):
        if next(calls) == call:
            planted.set()
            over.wait()
        return hidden

    return planted_model(blocking)


# A step makes 15 forwards of blocks in forward stages, then 15 recomputations of blocks.
def test_a_layer_that_blocks_is_reported_with_what_all_others_wait_for(planted, stuck):
    store = toy_store(toy_model())
    error = hang(hanging_engine(store, blocking_model(planted, stuck, call=35)))
    caller, *lines = error.report
    assert re.fullmatch(r"MainThread \(the call in progress\): waits for .+", caller)
    assert sum(line.startswith("torchround cpu:") for line in lines) == 2
    [blocked] = [line for line in lines if ", in wait" in line or "is in wait" in line]
    place = r"device cpu:\d, forward stage \(.*block\.\d.*\), micro-batch \d"
    assert re.match(rf"torchround cpu:\d: in {place}: .* called by .*\(.*test_watchdog", blocked)
    assert any(line.startswith("torchround optimizer: waits for ") for line in lines)
    assert "still inside a computation" in str(error), "the message says which thread could not be ended"
    assert store.step == 1 and store.is_consistent


def test_an_update_that_blocks_leaves_a_store_that_is_said_not_to_be_whole(planted, stuck):
    class Blocking(Observer):
        def touched(self, reads, writes):
            if this_thread() == "torchround optimizer" and len(writes) > 1:
                planted.set()
                stuck.wait()

    store = toy_store(toy_model())
    error = hang(hanging_engine(store, observer=Blocking()))
    assert "do not save it" in str(error) and not error.store_is_consistent and not store.is_consistent


OPTIMIZER, DEVICE = "torchround optimizer: waits for ", r"torchround cpu:\d: .*waits for "
LOST = [
    (BOUNDARY, DEVICE + r"the input of layer \d for micro-batch 1 of pass 1"),
    (BOUNDARY_GRADIENT, DEVICE + r"the gradient of layer \d's input for micro-batch 1 of pass 1"),
    (KEPT, DEVICE + r"the kept activations of layer 1 for micro-batch 0 of pass 1"),
    (LOSS, OPTIMIZER + r"the loss of micro-batch 1 of pass 1"),
    (LANDED, OPTIMIZER + r"stage of step 1 \(stage slot \d+, .*\) to write the gradient of block\.1"),
    (WRITTEN, DEVICE + r"the update of step 1 \(optimizer worker, block\.1\) to write the device"),
    (UPLOADED, OPTIMIZER + r"stage of step 1 \(stage slot .*\) to read the device weights of block\.1"),
    (STAGE_ENQUEUED, r"MainThread .*: waits for all of stage slot 12 to be enqueued"),
    (UPDATED, r"MainThread .*: waits for the update of step 2"),
    (STAGE_JOB, r"torchround cpu:0: in device cpu:0: waits for stage slot 8 to be handed out"),
]


# One of each kind of waiting thread, of a device's event, and of a rule; the others at night.
TELLING = (KEPT, LOSS, LANDED, WRITTEN, UPDATED)


def concerns(flag, number):
    """Tell whether an access, a value or jobs are of this number, and of bundle 1 or micro-batch 1."""
    if isinstance(flag, Access):
        return flag.task.step == number and "block.1" in flag.buffer.name
    if flag.kind == STAGE_JOB:
        return number in [getattr(job, "slot", None) for job in flag.content]
    return flag.numbers[0] == number and (not flag.numbers[1:] or 1 in flag.numbers[1:])


@pytest.mark.parametrize(
    ("kind", "waiting"),
    [pytest.param(*lost, marks=[pytest.mark.nightly] * (lost[0] not in TELLING), id=lost[0]) for lost in LOST],
)
def test_a_hand_over_that_is_lost_is_named_and_every_thread_ends(monkeypatch, planted, undisturbed, kind, waiting):
    number = {STAGE_JOB: 8, STAGE_ENQUEUED: 12, UPDATED: 2}.get(kind, 1)
    store = toy_store(toy_model())
    with monkeypatch.context() as patch:
        lose(*(patch, planted), lambda flag: kind_of(flag) == kind and concerns(flag, number))
        error = hang(hanging_engine(store, kept=toy.KEPT["all"] if kind is KEPT else ()))
    assert any(re.match(waiting, line) for line in error.report), error.report
    assert engine_threads() == []
    assert store.is_consistent
    with toy_engine(PARTITION, 3, store=store) as engine:
        train(engine, BATCHES[store.step :])
    toy.assert_same_state(store.named_views(), undisturbed)


class StuckEvent:
    def __init__(self, over, planted):
        self._over, self._planted = over, planted

    def synchronize(self):
        self._planted.set()
        self._over.wait()

    def query(self):
        if threading.current_thread() is threading.main_thread():
            self._planted.set()
        return self._over.is_set()


class StuckQueue(Observer):
    """Stops a queue, like a GPU's, at its `after`-th event while its device's thread still enqueues."""

    def __init__(self, stream, after, event):
        self.stream, self.left, self.event = stream, after, event

    def recorded(self, device, stream, event, what):
        self.left -= stream is self.stream
        return self.event if stream is self.stream and self.left < 0 else event

    def waits(self, device, stream, event, what):
        return PASSED  # like a GPU, enqueues the wait and returns


class StuckDevice(CpuDevice):
    def __init__(self, event):
        super().__init__(0)
        self.event = event

    def finish(self):
        self.event.synchronize()


@pytest.mark.parametrize(
    ("stream", "what"),
    [
        pytest.param(Stream.WEIGHT_UPLOAD, "an uploaded version", marks=pytest.mark.nightly),
        (Stream.ACTIVATION_DOWNLOAD, "sent tensors"),
        (Stream.GRADIENT_DOWNLOAD, "a landed gradient"),
    ],
)
def test_a_device_queue_that_stands_still_is_named_with_its_first_unfinished_event(planted, stuck, stream, what):
    """The caller waits for the device itself, or for the optimizer, which waits for the device."""
    event = StuckEvent(stuck, planted)

    def wrap(device):
        return watched(StuckDevice(event), StuckQueue(stream, 2, event)) if device.name == "cpu:0" else device

    error = hang(hanging_engine(wrap=wrap), "loss" if stream is Stream.ACTIVATION_DOWNLOAD else "update")
    if stream is Stream.ACTIVATION_DOWNLOAD:
        assert "waits for a device to finish the loss of micro-batch 0 of pass" in error.report[0]
    [line] = [line for line in error.report if line.startswith(f"  its {stream.value} queue")]
    assert re.search(rf"not passed \d+ event\(s\), the first one \({what}\) of device cpu:0, \w+ stage \(.*\)", line)


@pytest.mark.parametrize("call", ["loss", "drain", "forward_backward"])
def test_every_call_that_waits_ends_with_the_report_and_so_does_each_later_one(planted, stuck, call):
    engine = hanging_engine(model=blocking_model(planted, stuck, call=1))
    result = engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    calls = {"loss": result.loss, "drain": engine.drain, "forward_backward": lambda: train(engine, BATCHES[:2])}
    for _ in range(2):
        with pytest.raises(HangError):
            calls[call]()


def look(watchdog):
    for _ in range(LOOKS):
        watchdog._look()


def test_one_thing_that_moves_between_two_looks_is_enough():
    board, device = Board(), CpuDevice(0)
    watchdog = Watchdog(board, [SimpleNamespace(device=device)], [], 1e9)
    memory = device.allocate(1)
    for move in (
        lambda: board.post(Value(UPDATED, 0), None),
        board.note_progress,
        lambda: device.run(Stream.COMPUTE, memory.zero_),
        lambda: device.copy(Stream.WEIGHT_UPLOAD, memory, memory),
        lambda: device.record(Stream.COMPUTE),
    ):
        look(watchdog)
        move()
    assert board.failure is None


def test_events_that_a_device_passes_count_as_movement():
    """A thread that has enqueued everything is silent while its device still works."""
    passed = threading.Event()
    device = watched(CpuDevice(0), StuckQueue(Stream.COMPUTE, 0, StuckEvent(passed, threading.Event())))
    device.record(Stream.COMPUTE)
    before = device.moves()
    assert [stream for stream, *_ in device.unfinished()] == [Stream.COMPUTE] and device.moves() == before
    passed.set()
    assert device.moves() == before + 1 and list(device.unfinished()) == []


def test_the_watch_of_a_queue_that_is_far_behind_keeps_no_pass():
    """Otherwise it would keep all values of passes that are done."""

    class Behind(Observer):
        def recorded(self, device, stream, event, what):
            return SimpleNamespace(synchronize=lambda: None, query=lambda: this_thread() == "MainThread")

    def passes():
        gc.collect()
        return [found for found in gc.get_objects() if type(found) is Pass]

    of_other_tests = passes()
    with toy_engine(PARTITION, 1, wrap=lambda device: watched(device, Behind())) as engine:
        train(engine, toy_batches(8, micro_batches=1))
        assert len(passes()) <= len(of_other_tests) + 2


def test_a_look_that_comes_late_because_the_whole_process_stood_still_is_one_look():
    """A process that was stopped for longer than the time-out therefore continues."""
    board = Board()
    watchdog = Watchdog(board, [], [], 1e-9)
    look(watchdog)
    assert board.failure is None
    watchdog._look()
    assert isinstance(board.failure, HangError)

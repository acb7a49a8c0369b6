"""Saves beside training write the store as it is at their step, and do not change training."""

import threading
import time

import pytest
import torch

from tests.support.faults import Bomb, PlantedError, armed, wait_until
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store
from torchround.checkpoint import Checkpointer
from torchround.checkpoint.folders import UNFINISHED, checkpoint_name
from torchround.engine.errors import PipelineError, Stopped
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.device_worker import STAGE_JOB
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC

PARTITION = PARTITIONS["backward coarser"]
KINDS = {
    "sync, partly frozen": {"frozen": (0, 2)},
    "sync, tied, two rounds": {"tied": True, "rounds": 2},
    "async, predict": {"mode": ASYNC_PREDICT},
    "async, tied, two rounds, bfloat16": {"mode": ASYNC, "tied": True, "rounds": 2, "dtype": torch.bfloat16},
    "bounded": {"mode": BOUNDED, "stale_layers": 2},
    "async, float16, every update skipped": {"mode": ASYNC, "dtype": torch.float16, "poisoned": True},
}


def build(tied=False, frozen=(), mode=SYNC, dtype=torch.float32, poisoned=False, **settings):
    model = toy_model(tied)
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    store = toy_store(model, dtype, mode=mode)
    if poisoned:
        for device_weight in store.bundles[1].device_weights:
            device_weight.fill_(torch.inf)
    return toy_engine(PARTITION, 3, model=model, store=store, **settings)


def step(engine, micro_batches):
    result = engine.forward_backward(micro_batches)
    engine.step(1e-2)
    return result


def files(folder):
    return {(path.parent.name, path.name): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def saving(checkpointer):
    return lambda source: checkpointer.save(source.step, source.tensors, source.state, source)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_of_each_step_beside_training_equals_one_that_blocks_byte_for_byte(kind, tmp_path):
    batches = toy_batches(3, micro_batches=3)
    with build(**KINDS[kind]) as engine:
        for micro_batches in batches:
            step(engine, micro_batches)
            engine.drain()
            store = engine.store
            Checkpointer(tmp_path / "blocking").save(store.step, store.named_views(), store.resume_state())
        expected = {name: view.clone() for name, view in store.named_views().items()}
    with build(**KINDS[kind]) as engine:
        for micro_batches in batches:
            step(engine, micro_batches)
            engine.save(saving(Checkpointer(tmp_path / "beside"))).may_publish()
    assert_same_state(engine.store.named_views(), expected)
    blocking, beside = files(tmp_path / "blocking"), files(tmp_path / "beside")
    assert beside.keys() == blocking.keys() and len(beside) == 3 * len(batches)
    assert [name for name in blocking if beside[name] != blocking[name]] == []


def first_bundle(source):
    first = next(iter(source.tensors)).removeprefix("weights/").split(".")[0]
    own = [name for name in source.tensors if name.split("/")[1].startswith(first)]
    return own, {name: tensor.clone() for name, tensor in source.tensors.items()}


def test_a_bundle_is_updated_once_it_was_read_and_all_others_wait_for_the_save():
    """The save reads one bundle and waits. The next step is computed, and its update stops at the second bundle."""
    computed = threading.Event()

    def slow(source):
        own, before = first_bundle(source)
        assert computed.wait(60)
        *most, last = own
        for name in most:
            source.finished_reading(name)
        time.sleep(0.05)
        assert all(torch.equal(tensor, before[name]) for name, tensor in source.tensors.items()), "none was read whole"
        source.finished_reading(last)
        wait_until(lambda: not any(torch.equal(source.tensors[name], before[name]) for name in own))
        time.sleep(0.05)
        return [name for name in before if name not in own and not torch.equal(source.tensors[name], before[name])]

    with build() as engine:
        first, second = toy_batches(2, micro_batches=4)
        step(engine, first)
        save = engine.save(slow)
        result = step(engine, second)
        assert result.loss() > 0  # the step after the save's is computed meanwhile
        result.reports()
        computed.set()
        assert save.result() == []
    assert engine.store.step == 2


def test_a_save_may_begin_before_the_first_step_and_twice_for_one_step(tmp_path):
    checkpointers = [Checkpointer(tmp_path / name) for name in ("first", "again", "later")]
    with build() as engine:
        for checkpointer in checkpointers[:2]:
            engine.save(saving(checkpointer)).may_publish()
        for micro_batches in toy_batches(2, micro_batches=4):
            step(engine, micro_batches)
        engine.save(saving(checkpointers[2])).may_publish()
    assert [checkpointer.complete_steps() for checkpointer in checkpointers] == [[0], [0], [2]]
    first, again = (files(tmp_path / name) for name in ("first", "again"))
    assert first == again and len(first) == 3


def test_a_checkpoint_appears_only_when_it_is_allowed_to(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with build() as engine:
        for index, micro_batches in enumerate(toy_batches(4, micro_batches=4)):
            step(engine, micro_batches)
            if index == 0:
                save = engine.save(saving(checkpointer))
        engine.drain()  # three more updates: everything was read long ago
        assert not save.ended and checkpointer.complete_steps() == []
        save.may_publish()
        assert save.result() == tmp_path / checkpoint_name(1)
        assert checkpointer.complete_steps() == [1]


def fail(engine, bomb):
    bomb.place = ("has", STAGE_JOB)
    with pytest.raises(PipelineError, match="planted"):
        step(engine, toy_batches(1, micro_batches=4)[0])
        engine.drain()


def until_abandoned(source):
    with pytest.raises(Stopped):
        while True:
            source.raise_if_abandoned()
            time.sleep(0.001)


@pytest.mark.parametrize("method", ["resume_state", "bundle_views"])
def test_a_fault_before_a_save_is_written_is_an_error_of_that_save_alone(monkeypatch, method):
    def fails(*arguments):
        raise PlantedError

    first, second = toy_batches(2, micro_batches=4)
    with build() as engine:
        step(engine, first)
        with monkeypatch.context() as during:
            during.setattr(HostStore, method, fails)
            save = engine.save(lambda source: "written")
            with pytest.raises(PipelineError, match="saver: PlantedError"):
                save.result()
        assert save.ended
        step(engine, second)
        assert engine.save(lambda source: "written").result() == "written"
    assert engine.store.step == 2


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
def test_a_fault_in_the_middle_of_a_save_gives_it_up_and_leaves_a_whole_update(mode, tmp_path):
    """An update waits in its middle for a save that is stuck, and a device fails. The update must be completed."""
    in_the_middle = threading.Event()

    def stuck(source):
        own, before = first_bundle(source)
        for name in own:
            source.finished_reading(name)
        wait_until(lambda: not any(torch.equal(source.tensors[name], before[name]) for name in own))
        (tmp_path / checkpoint_name(1, UNFINISHED)).mkdir()
        in_the_middle.set()
        until_abandoned(source)
        source.raise_if_abandoned()

    bomb = Bomb(None)
    engine, expected = build(mode=mode, **armed(bomb)), build(mode=mode)
    batches = toy_batches(2, micro_batches=4)
    step(engine, batches[0])
    save = engine.save(stuck)
    step(engine, batches[1])
    assert in_the_middle.wait(60)
    fail(engine, bomb)
    assert not save.ended
    assert engine.store.is_consistent and engine.store.step == 2
    with expected:
        for micro_batches in batches:
            step(expected, micro_batches)
    assert_same_state(engine.store.named_views(), expected.store.named_views())
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1, UNFINISHED)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchround")]


def test_a_save_that_ends_its_thread_in_the_middle_of_an_update_leaves_a_store_that_is_said_to_be_whole():
    def ending(source):
        own, before = first_bundle(source)
        for name in own:
            source.finished_reading(name)
        wait_until(lambda: not any(torch.equal(source.tensors[name], before[name]) for name in own))
        raise SystemExit("planted")

    engine = build()
    step(engine, toy_batches(1, micro_batches=4)[0])
    engine.save(ending)
    with pytest.raises(PipelineError, match=r"^saver: SystemExit: planted$") as error:
        step(engine, toy_batches(1, micro_batches=4)[0]).update()
        engine.drain()
    assert error.value.store_is_consistent and engine.store.is_consistent and engine.store.step == 2


def test_nothing_is_published_after_a_fault_though_it_was_allowed_before():
    published = []

    def late(source):
        until_abandoned(source)
        source.before_publishing()
        published.append(source.step)

    bomb = Bomb(None)
    engine = build(**armed(bomb))
    save = engine.save(late)
    save.may_publish()
    fail(engine, bomb)
    assert not published and not save.ended

"""Saves beside training write the store as it is at their step, and do not change training."""

import threading

import pytest
import torch

from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, watched
from torchround.checkpoint import Checkpointer, CheckpointError
from torchround.engine.bounded_updates import BoundedOptimizerWorker
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races

PARTITION = PARTITIONS["backward coarser"]
STEPS = 5
KINDS = {
    "sync": {},
    "sync, tied, two rounds": {"tied": True, "rounds": 2},
    "sync, partly frozen": {"frozen": (0, 2)},
    "async": {"policy": ASYNC},
    "async, predict": {"policy": ASYNC_PREDICT},
    "async, tied, two rounds, bfloat16": {"policy": ASYNC, "tied": True, "rounds": 2, "dtype": torch.bfloat16},
    "async, float16, every update skipped": {"policy": ASYNC, "dtype": torch.float16, "poisoned": True},
}


def build(tied=False, frozen=(), policy=SYNC, dtype=torch.float32, poisoned=False, **settings):
    model = toy_model(tied)
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    store = toy_store(model, dtype, policy=policy)
    if poisoned:
        for device_weight in store.bundles[1].device_weights:
            device_weight.fill_(torch.inf)
    return toy_engine(model, store, PARTITION, 3, **settings)


def files(folder):
    return {(path.parent.name, path.name): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def saving(checkpointer):
    """Return the function that a run gives to `Engine.save`."""
    return lambda source: checkpointer.save(source.step, source.tensors, source.state, source)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_of_each_step_beside_training_equals_one_that_blocks_byte_for_byte(kind, tmp_path):
    batches = toy_batches(STEPS, micro_batches=4)
    with build(**KINDS[kind]) as engine:
        for micro_batches in batches:
            engine.forward_backward(micro_batches)
            engine.step(1e-2)
            engine.drain()
            store = engine.store
            Checkpointer(tmp_path / "blocking").save(store.step, store.named_views(), store.resume_state())
        expected = {name: view.clone() for name, view in store.named_views().items()}
    with build(**KINDS[kind]) as engine:
        for micro_batches in batches:
            engine.forward_backward(micro_batches)
            engine.step(1e-2)
            engine.save(saving(Checkpointer(tmp_path / "beside"))).may_publish()
    assert_same_state(engine.store.named_views(), expected)
    blocking, beside = files(tmp_path / "blocking"), files(tmp_path / "beside")
    assert beside.keys() == blocking.keys() and len(beside) == 3 * STEPS
    assert [name for name in blocking if beside[name] != blocking[name]] == []


def test_no_update_of_a_bundle_begins_before_it_was_read_and_all_others_may(monkeypatch):
    """The save reads one bundle and waits. The next step is computed, and its update stops at the second bundle."""
    read_one, go_on, updated = threading.Event(), threading.Event(), []
    update = OptimizerWorker._update_bundle

    def watched(worker, bundle, step, *arguments):
        updated.append((step, bundle.index))
        update(worker, bundle, step, *arguments)

    monkeypatch.setattr(OptimizerWorker, "_update_bundle", watched)

    def slow(source):
        first = next(iter(source.tensors)).removeprefix("weights/").split(".")[0]
        for name in [name for name in source.tensors if name.split("/")[1].startswith(first)]:
            source.finished_reading(name)
        read_one.set()
        assert go_on.wait(60)
        return list(updated)

    with build() as engine:
        for micro_batches in toy_batches(2, micro_batches=4):
            result = engine.forward_backward(micro_batches)
            engine.step(1e-2)
            if engine._step == 1:
                save = engine.save(slow)
        assert read_one.wait(60)
        assert result.loss() > 0  # the step after the save's is computed meanwhile
        result.reports()
        go_on.set()
        before_it_was_read = save.result()
        report = result.update()
    bundles = len(engine.store.trained)
    assert [step for step, _ in before_it_was_read].count(0) == bundles
    assert set(before_it_was_read) - {(0, index) for index in range(bundles)} <= {(1, 0)}
    assert report.waited_for_save_s > 0
    assert len(updated) == 2 * bundles


def test_a_save_may_begin_before_the_first_step_and_twice_for_one_step(tmp_path):
    checkpointers = [Checkpointer(tmp_path / name) for name in ("first", "again", "later")]
    with build() as engine:
        for checkpointer in checkpointers[:2]:
            engine.save(saving(checkpointer)).may_publish()
        for micro_batches in toy_batches(2, micro_batches=4):
            engine.forward_backward(micro_batches)
            engine.step(1e-2)
        engine.save(saving(checkpointers[2])).may_publish()
    assert [checkpointer.complete_steps() for checkpointer in checkpointers] == [[0], [0], [2]]
    first, again = (files(tmp_path / name) for name in ("first", "again"))
    assert first == again and len(first) == 3


def test_a_checkpoint_appears_only_when_it_is_allowed_to(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with build() as engine:
        for index, micro_batches in enumerate(toy_batches(4, micro_batches=4)):
            engine.forward_backward(micro_batches)
            engine.step(1e-2)
            if index == 0:
                save = engine.save(saving(checkpointer))
        engine.drain()  # three more updates: everything was read long ago
        assert not save.ended and checkpointer.complete_steps() == []
        save.may_publish()
        assert save.result() == tmp_path / "step-1"
        assert checkpointer.complete_steps() == [1]


def test_a_save_that_fails_raises_for_its_caller_and_holds_nothing_up(tmp_path):
    (tmp_path / "file").write_text("")
    with build() as engine:
        for micro_batches in toy_batches(3, micro_batches=4):
            engine.forward_backward(micro_batches)
            engine.step(1e-2)
            save = engine.save(saving(Checkpointer(tmp_path / "file" / "below")))
            with pytest.raises(CheckpointError, match="could not be written"):
                save.result()
    assert engine.store.step == 3


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_fault_in_the_middle_of_a_save_gives_it_up_and_leaves_a_whole_update(policy, monkeypatch, tmp_path):
    """An update waits in its middle for a save that is stuck, and a device fails. The update must be completed."""
    waiting, failed = threading.Event(), threading.Event()
    update = OptimizerWorker._update_bundle

    def watched(worker, bundle, step, *arguments):
        update(worker, bundle, step, *arguments)
        if (step, bundle.index) == (1, 1):
            waiting.set()

    monkeypatch.setattr(OptimizerWorker, "_update_bundle", watched)

    def stuck(source):
        names = list(source.tensors)
        for name in names[: len(names) // 2]:
            source.finished_reading(name)
        assert failed.wait(60)
        (tmp_path / "step-1.tmp").mkdir()
        source.raise_if_abandoned()
        raise AssertionError("the engine has ended, and the save continues")

    engine = build(policy=policy)
    batches = toy_batches(4, micro_batches=4)
    for micro_batches in batches[:2]:
        engine.forward_backward(micro_batches)
        engine.step(1e-2)
        if engine._step == 1:
            save = engine.save(stuck)
    assert waiting.wait(60)
    engine._life.fail(PipelineError(None, "planted"))
    failed.set()
    with pytest.raises(PipelineError, match="planted"):
        engine.drain()
    assert not save.ended
    assert engine.store.is_consistent and engine.store.step == 2
    expected = build(policy=policy)
    with expected:
        for micro_batches in batches[:2]:
            expected.forward_backward(micro_batches)
            expected.step(1e-2)
    assert_same_state(engine.store.named_views(), expected.store.named_views())
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.tmp"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchround")]


def test_nothing_is_published_after_a_fault_though_it_was_allowed_before():
    failed, published = threading.Event(), []

    def late(source):
        assert failed.wait(60)
        source.before_publishing()
        published.append(source.step)

    engine = build()
    save = engine.save(late)
    save.may_publish()
    engine._life.fail(PipelineError(None, "planted"))
    failed.set()
    with pytest.raises(PipelineError, match="planted"):
        engine.drain()
    assert not published and not save.ended


def test_a_save_between_forward_backward_and_step_is_refused():
    with build() as engine:
        engine.forward_backward(toy_batches(1, micro_batches=4)[0])
        with pytest.raises(EngineUsageError, match="save"):
            engine.save(lambda source: None)
        engine.step(1e-2)


def record(tmp_path, saves_every, policy, **options):
    """Return the races of a recorded run with saves."""
    log = AccessLog()
    if policy is BOUNDED and "rounds" not in options:
        options = {"stale_layers": 3, **options}

    def wrap(device):
        return watched(device, log)

    checkpointer = Checkpointer(tmp_path)
    with build(policy=policy, observer=log, wrap=wrap, **options) as engine:
        for index, micro_batches in enumerate(toy_batches(4, micro_batches=4)):
            engine.forward_backward(micro_batches)
            engine.step(1e-2)
            if index % saves_every == 0:
                engine.save(saving(checkpointer)).may_publish()
    return find_races(log.entries)


@pytest.mark.parametrize("policy", [SYNC, ASYNC, BOUNDED], ids=lambda policy: policy.name)
@pytest.mark.parametrize("options", [{}, {"tied": True, "rounds": 2}, {"poisoned": True}], ids=str)
def test_no_race_with_saves_beside_training(policy, options, tmp_path):
    assert record(tmp_path, 1, policy, **options) == []


@pytest.mark.parametrize("policy", [SYNC, ASYNC, BOUNDED], ids=lambda policy: policy.name)
@pytest.mark.parametrize("rule", ["before_overwriting_saved", "before_save"])
def test_rule_6_a_save_is_ordered_with_the_updates_before_and_after_it(rule, policy, monkeypatch, tmp_path):
    def unordered(ordering, *arguments):
        return {"applied_updates": 0}

    monkeypatch.setattr(Ordering, rule, unordered)
    assert record(tmp_path, 2, policy)


def test_rule_6_holds_for_device_weights_that_lag(monkeypatch, tmp_path):
    """A save reads them, and the next step writes the newest ones over them before it updates anything."""
    write = BoundedOptimizerWorker._write_lagging

    def at_once(worker, step):
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Ordering, "before_overwriting_saved", lambda *_: None)
            write(worker, step)

    monkeypatch.setattr(BoundedOptimizerWorker, "_write_lagging", at_once)
    assert record(tmp_path, 2, BOUNDED)


def test_a_long_run_with_saves_keeps_few_hand_overs_of_old_ones(tmp_path):
    counts = []
    with build() as engine:
        for _ in range(3):
            for micro_batches in toy_batches(6, micro_batches=4):
                engine.forward_backward(micro_batches)
                engine.step(1e-2)
                save = engine.save(saving(Checkpointer(tmp_path, keep_latest_k=1)))
                save.may_publish()
            engine.drain()
            save.wait()
            counts.append(len(engine._board))
    # One for how each save ended, and the last save itself if the saver has not finished with it.
    assert counts[2] - counts[1] <= 6 + 1

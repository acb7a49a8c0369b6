"""Any optimizer of PyTorch through the engine: bit for bit the plain loop's, with its own state and hyperparameters."""

import copy
import threading
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.toy import (
    MAX_NORM,
    OPTIMIZER,
    PARTITIONS,
    PlainLoop,
    assert_same_state,
    linked,
    toy_batches,
    toy_model,
    toy_store,
    watched,
)
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.host_updates import HostOptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.ownership import Ownership
from torchround.engine.watch.race_checker import AccessLog, find_races
from torchround.optim import HostOptimizer, SlowerOptimizerWarning, clip_scale

STEPS = 4
PARTITION = PARTITIONS["backward coarser"]
MAKERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.003, momentum=0.5),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.02),
}


@pytest.fixture(autouse=True)
def known_to_be_slower():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerOptimizerWarning)
        yield


class TorchLoop(PlainLoop):
    """The plain loop with an optimizer of PyTorch. `delay` is 1 if gradients are those of the weights before."""

    def __init__(self, model, store, tied, make, max_norm=MAX_NORM, delay=0):
        super().__init__(model, {name: view.clone() for name, view in store.weights().items()}, tied)
        self.optimizer = make(list(self.owned.items()))
        self.max_norm, self.older = max_norm, [self.copies()] * delay

    def copies(self):
        return {name: parameter.detach().clone() for name, parameter in self._name.items()}

    def write(self, values):
        for name, parameter in self._name.items():
            parameter.data.copy_(values[name])

    def gradients(self, micro_batches):
        if not self.older:
            return super().gradients(micro_batches)
        newest = self.copies()
        self.write(self.older.pop(0))
        self.older.append(newest)
        found = super().gradients(micro_batches)
        self.write(newest)
        return found

    def update(self, gradients, lr):
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
        factor = clip_scale(squares**0.5, self.max_norm)
        for name, parameter in self.owned.items():
            parameter.grad = gradients[name].clone()
            if factor != 1.0:
                parameter.grad *= factor
        self.optimizer.step()
        if self.tied:
            self._name["head.weight"].data.copy_(self._name["embedding.weight"].data)

    def state(self):
        return {f"weights/{name}": parameter.data for name, parameter in self.owned.items()}


def host_engine(
    model,
    store,
    optimizer,
    num_devices=2,
    observer=None,
    wrap=lambda device: device,
    partition=PARTITION,
    **settings,
):
    settings = EngineSettings(**{"max_norm": MAX_NORM, "hang_timeout_s": 60.0, **settings})
    devices = [wrap(CpuDevice(index)) for index in range(num_devices)]
    return Engine(model, store, devices, partition, optimizer=optimizer, settings=settings, observer=observer)


def train(engine, batches, after=lambda: None):
    results = []
    for micro_batches in batches:
        results.append(engine.forward_backward(micro_batches))
        engine.step()
        after()
    engine.drain()
    return [result.loss() for result in results]


def moment_free(model, **options):
    return toy_store(model, keeps_moments=False, **options)


@pytest.mark.parametrize(("num_devices", "tied"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", MAKERS)
def test_an_optimizer_of_torch_updates_as_in_a_plain_loop(kind, policy, num_devices, tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=3)
    model.layers[2].requires_grad_(False)
    store = moment_free(model, policy=policy)
    # Without clipping: a norm that is added up in another order would round the factor elsewhere.
    loop = TorchLoop(model, store, tied, MAKERS[kind], max_norm=0.0, delay=policy.versions - 1)
    with host_engine(model, store, HostOptimizer(MAKERS[kind]), num_devices, max_norm=0.0) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    trained = {name: view for name, view in store.weights().items() if name in loop.owned}
    assert_same_state({f"weights/{name}": view for name, view in trained.items()}, loop.state())
    assert store.applied_updates == store.step == STEPS


def test_the_gradient_is_clipped():
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=3)
    store = moment_free(model)
    loop, free = (TorchLoop(model, store, False, MAKERS["sgd"], norm) for norm in (MAX_NORM, 0.0))
    with host_engine(model, store, HostOptimizer(MAKERS["sgd"])) as engine:
        train(engine, batches)
    loop.train(batches), free.train(batches)
    for name, view in store.weights().items():
        torch.testing.assert_close(view, loop.owned[name].data)
    assert not torch.allclose(view, free.owned[name].data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_reach_the_optimizer_in_fp32_without_their_loss_scale(dtype):
    seen = []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([parameter.grad.clone() for parameter in self.param_groups[0]["params"]])
            return super().step(closure)

    model, batches = toy_model(), toy_batches(2, micro_batches=3)
    store = moment_free(model, dtype=dtype)
    with host_engine(
        model, store, HostOptimizer(lambda named: Recording(named, lr=0.01)), max_norm=0.0
    ) as engine:
        result = engine.forward_backward(batches[0])
        engine.step()
        norm = result.update().grad_norm
    assert {gradient.dtype for gradient in seen[0]} == {torch.float32}
    assert norm == pytest.approx(sum(float(gradient.square().sum()) for gradient in seen[0]) ** 0.5, rel=1e-5)
    # The device weights are the rounded fp32 weights.
    for bundle in store.trained:
        assert torch.equal(bundle.version(store.step), bundle.weight.to(dtype))


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_several_calls_add_up_for_it_too(policy):
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=4)
    states = []
    for accumulates in (False, True):
        store = moment_free(model, policy=policy)
        rounds = 1 if accumulates else 2
        optimizer = HostOptimizer(MAKERS["adamw"])
        with host_engine(model, store, optimizer, rounds=rounds, accumulates=accumulates) as engine:
            for micro_batches in batches:
                for part in (micro_batches[:2], micro_batches[2:]) if accumulates else (micro_batches,):
                    engine.forward_backward(part, num_labels=1)
                engine.step()
        states.append(store.named_views())
    assert_same_state(*states)


# Hyperparameters.


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_scheduler_may_change_them_while_steps_are_under_way(monkeypatch, policy):
    """Every step of the optimizer's thread is late by two steps of the scheduler, as far as two passes allow."""
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    store, optimizer = moment_free(model, policy=policy), HostOptimizer(MAKERS["sgd"])
    loop = TorchLoop(model, store, False, MAKERS["sgd"], max_norm=0.0, delay=policy.versions - 1)
    scheduled, apply = threading.Semaphore(0), HostOptimizerWorker._apply

    def late(worker, *arguments):
        scheduled.acquire()
        return apply(worker, *arguments)

    monkeypatch.setattr(HostOptimizerWorker, "_apply", late)
    plain = ExponentialLR(loop.optimizer, 0.5)
    losses = []
    for micro_batches in batches:
        losses.append(loop.step(micro_batches, 0.0))
        plain.step()
    with (
        host_engine(model, store, optimizer, max_norm=0.0) as engine,
        warnings.catch_warnings(),
    ):
        # One of them would say that the scheduler came before the optimizer.
        warnings.simplefilter("error")
        scheduler = ExponentialLR(optimizer.optimizer, 0.5)

        def after():
            scheduler.step()
            scheduled.release()

        assert train(engine, batches, after) == losses
    assert_same_state({f"weights/{name}": view for name, view in store.weights().items()}, loop.state())
    assert optimizer.optimizer.param_groups[0]["lr"] == plain.get_last_lr()[0]


def test_a_learning_rate_of_the_call_holds_for_one_step():
    model, batches = toy_model(), toy_batches(2, micro_batches=2)
    store, seen = moment_free(model), []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    def make(named):
        return Recording([{"params": named[:2], "lr": 0.1}, {"params": named[2:], "lr": 0.2}], lr=0.3)

    with host_engine(model, store, HostOptimizer(make)) as engine:
        for lr in (0.5, None):
            engine.forward_backward(batches[0])
            engine.step(lr)
    assert seen == [[0.5, 0.5], [0.1, 0.2]]


def test_it_continues_with_a_new_engine_and_from_its_saved_state():
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    whole = moment_free(model)
    with host_engine(model, whole, HostOptimizer(MAKERS["adamw"])) as engine:
        train(engine, batches)
    store, optimizer = moment_free(model), HostOptimizer(MAKERS["adamw"])
    with host_engine(model, store, optimizer) as engine:
        train(engine, batches[:2])
    saved = copy.deepcopy(optimizer.state_dict())  # it refers to the state, which changes
    weights = {name: view.clone() for name, view in store.weights().items()}
    with host_engine(model, store, optimizer, num_devices=3) as engine:
        train(engine, batches[2:])
    assert_same_state(store.named_views(), whole.named_views())
    other, loaded = moment_free(model, seed=1), HostOptimizer(MAKERS["adamw"])
    for name, view in other.weights().items():
        view.copy_(weights[name])
    other.resume(2, 2)
    with host_engine(model, other, loaded) as engine:
        loaded.load_state_dict(saved)
        train(engine, batches[2:])
    assert_same_state(other.named_views(), whole.named_views())


def test_its_parameters_come_in_the_order_of_the_model():
    """PyTorch numbers them in this order in a saved state. The store has matrices before vectors."""
    model, seen = toy_model(tied=True), []
    model.layers[2].requires_grad_(False)

    def make(named):
        seen.extend(name for name, _ in named)
        return MAKERS["sgd"](named)

    with host_engine(model, moment_free(model), HostOptimizer(make)):
        pass
    assert seen == [name for name in model.stored_shapes() if not name.startswith("block.1.")]


# Memory.


def test_a_store_without_moments_holds_two_fp32_buffers_less():
    model = toy_model()
    model.layers[2].requires_grad_(False)
    usual, free = toy_store(model), moment_free(model)
    trained = sum(bundle.numel for bundle in free.trained)
    assert usual.nbytes() - free.nbytes() == 2 * 4 * trained
    assert all(bundle.exp_avg is None and bundle.exp_avg_sq is None for bundle in free.bundles)
    assert {name.split("/")[0] for name in free.named_views()} == {"weights"}


# Faults and skipped steps.


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_gradient_that_is_not_finite_leaves_weights_and_state_as_they_are(policy):
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store, optimizer = moment_free(model, policy=policy), HostOptimizer(MAKERS["adamw"])
    with host_engine(model, store, optimizer) as engine:
        train(engine, batches[:1])
        before = {name: view.clone() for name, view in store.weights().items()}
        for bundle in store.trained[1:2]:
            for device_weights in bundle.device_weights:
                device_weights.fill_(torch.inf)
        result = engine.forward_backward(batches[1])
        engine.step()
        assert result.update().skipped
        engine.drain()
        assert all(torch.equal(view, before[name]) for name, view in store.weights().items())
        assert {int(state["step"]) for state in optimizer.optimizer.state.values()} == {1}


class Failing(torch.optim.SGD):
    """An optimizer whose second step fails, before or in the middle of its writes."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise ArithmeticError("planted")
        return super().step(closure)


def test_a_fault_inside_the_step_marks_the_store():
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store = moment_free(model)
    engine = host_engine(model, store, HostOptimizer(lambda named: Failing(named, lr=0.1)))
    with pytest.raises(
        PipelineError, match=r"Failing.step\(\) raised ArithmeticError: planted.*do not save"
    ) as told:
        train(engine, batches)
    assert not told.value.store_is_consistent and not store.is_consistent
    with pytest.raises(EngineUsageError, match="mixes two weight versions"):
        host_engine(model, store, HostOptimizer(MAKERS["sgd"]))


def test_a_fault_before_the_step_leaves_the_last_whole_update(monkeypatch):
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store, optimizer, gradients = (
        moment_free(model),
        HostOptimizer(MAKERS["sgd"]),
        HostOptimizerWorker._gradients,
    )

    def failing(worker, step, *arguments):
        if step == 1:
            raise ArithmeticError("planted")
        return gradients(worker, step, *arguments)

    monkeypatch.setattr(HostOptimizerWorker, "_gradients", failing)
    engine = host_engine(model, store, optimizer)
    with pytest.raises(PipelineError, match="planted"):
        train(engine, batches)
    assert store.is_consistent and store.step == 1
    monkeypatch.undo()
    with host_engine(model, store, optimizer) as engine:
        train(engine, batches[1:])
    whole = moment_free(model)
    with host_engine(model, whole, HostOptimizer(MAKERS["sgd"])) as engine:
        train(engine, batches)
    assert_same_state(store.named_views(), whole.named_views())


def test_a_fault_while_device_weights_are_written_is_overcome_by_a_second_try(monkeypatch):
    model, batches = toy_model(), toy_batches(2, micro_batches=2)
    store, write, times = moment_free(model), HostOptimizerWorker._update_bundle, []

    def failing(worker, bundle, *arguments):
        times.append(bundle.index)
        if times.count(1) == 1 and bundle.index == 1:
            raise ArithmeticError("planted")
        write(worker, bundle, *arguments)

    monkeypatch.setattr(HostOptimizerWorker, "_update_bundle", failing)
    engine = host_engine(model, store, HostOptimizer(MAKERS["sgd"]))
    with pytest.raises(PipelineError, match="planted"):
        train(engine, batches)
    assert store.is_consistent and store.step == 1
    assert all(torch.equal(bundle.version(1), bundle.weight) for bundle in store.trained)


# Refusals.


@pytest.mark.parametrize(
    ("policy", "machines", "words"),
    [(BOUNDED, 1, "bounded"), (ASYNC_PREDICT, 1, "predict"), (SYNC, 2, "one machine")],
)
def test_who_cannot_use_it_says_so(policy, machines, words):
    model = toy_model()
    store = HostStore(model, policy=policy, ownership=Ownership(0, machines), keeps_moments=False)
    with pytest.raises(EngineUsageError, match=words):
        host_engine(model, store, HostOptimizer(MAKERS["sgd"]), max_norm=0.0)


def test_adamw_refuses_a_store_without_moments_and_a_step_without_a_rate():
    model, [batch] = toy_model(), toy_batches(1, micro_batches=2)
    with pytest.raises(EngineUsageError, match="keeps_moments"):
        host_engine(model, moment_free(model), OPTIMIZER)
    with host_engine(model, toy_store(model), OPTIMIZER) as engine:
        engine.forward_backward(batch)
        with pytest.raises(EngineUsageError, match="learning rate"):
            engine.step()
        engine.step(0.1)


def test_an_optimizer_that_needs_a_closure_is_refused_before_any_device_is_used():
    model = toy_model()
    with pytest.raises(EngineUsageError, match="LBFGS.*closure"):
        host_engine(
            model, moment_free(model), HostOptimizer(lambda named: torch.optim.LBFGS(p for _, p in named))
        )


# Races.


def races(policy, partition="backward coarser", accumulates=False, evaluates=True, tied=True, steps=3):
    log, model = AccessLog(), toy_model(tied)
    store = moment_free(model, policy=policy)
    settings = {"observer": log, "wrap": lambda device: watched(linked(device), log)}
    settings |= {"accumulates": accumulates, "partition": PARTITIONS[partition]}
    with host_engine(model, store, HostOptimizer(MAKERS["sgd"]), 3, **settings) as engine:
        for step, micro_batches in enumerate(toy_batches(steps, micro_batches=4)):
            if evaluates and step == 1:
                engine.evaluate(micro_batches)  # not awaited, so that it runs beside the next step
            for part in (micro_batches[:2], micro_batches[2:]) if accumulates else (micro_batches,):
                result = engine.forward_backward(part)
            engine.step()
            if evaluates and step == 1:
                result.update()  # first: asking for the evaluation's loss would order the two
        engine.drain()
    return find_races(log.entries)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_there_is_no_race(policy, accumulates):
    assert races(policy, accumulates=accumulates) == []


RULES = {
    "before_device_weight_write": {"policy": SYNC, "partition": "one stage", "tied": False, "steps": 2},
    "before_upload": {"policy": SYNC, "partition": "forward coarser"},
    "before_gradient_read": {"policy": SYNC, "partition": "forward coarser", "tied": False},
    "before_gradient_write": {
        "policy": ASYNC,
        "partition": "forward coarser",
        "tied": False,
        "evaluates": False,
        "steps": 4,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_1_to_4_are_needed(monkeypatch, rule):
    assert races(**RULES[rule]) == []
    if rule == "before_gradient_read":
        monkeypatch.setattr(Ordering, "retire", lambda *_: None)  # the optimizer runs past hand-overs
    monkeypatch.setattr(Ordering, rule, lambda *_: None)
    assert races(**RULES[rule])

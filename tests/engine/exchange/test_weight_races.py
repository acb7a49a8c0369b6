"""The race checker finds nothing in the exchange of compressed and rewritten weights, and a race for each removed wait."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.machines import run_machines
from tests.support.shared_steps import train_shared
from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store, watched
from torchround.engine.board import HandOverKey
from torchround.engine.exchange.start import share_weights
from torchround.engine.exchange.weight_encoding import SPACE_FREE, WeightEncoder
from torchround.engine.exchange.weights import WeightExchange
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC, UpdatePolicy
from torchround.engine.store.ownership import Ownership
from torchround.engine.watch.race_checker import AccessLog, find_races
from torchround.machines.group import MachineGroup
from torchround.optim import SpikeBounds

BATCHES = toy_batches(4, micro_batches=4)
HELD_OUT = toy_batches(1, micro_batches=2, seed=5)[0]
POLICIES = {"sync": SYNC, "async": ASYNC, "predict": ASYNC_PREDICT}


def races(policy: UpdatePolicy, lr: float = 1e-5, validates: bool = False) -> list[Any]:
    """Return the races on two machines with compressed weights, of which a spike skips a step.

    If it `validates`, evaluations before and inside the true weights are not awaited.
    """

    def run(group: MachineGroup) -> list[Any]:
        log, model = AccessLog(), toy_model(tied=True)
        store = toy_store(
            model,
            torch.bfloat16,
            policy=policy,
            spikes=SpikeBounds(0.01, 1),
            ownership=Ownership(group.rank, group.size),
        )
        share_weights(store, group)
        options = {"observer": log, "machines": group, "compress_weights": True}
        partition, wrap = PARTITIONS["backward coarser"], lambda device: watched(device, log)
        with toy_engine(model, store, partition, 2, wrap=wrap, **options) as engine:
            for batch in BATCHES:
                train_shared(engine, [batch], group.rank, group.size, lr)
                if validates:
                    engine.evaluate(HELD_OUT)
                    with engine.true_device_weights():
                        engine.evaluate(HELD_OUT)
        assert sum(entry.action == "access" for entry in log.entries) > 100
        return find_races(log.entries)

    return [race for found in run_machines(2, run) for race in found]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_race_in_the_exchange_of_compressed_weights(policy: str) -> None:
    for lr in (1e-5, 1e-2):  # at the larger rate the weights themselves are sent
        assert races(POLICIES[policy], lr) == []


def test_no_race_around_validations_of_the_true_weights() -> None:
    assert races(ASYNC_PREDICT, validates=True) == []


class Hasty:
    """A stand-in for a board or its rules that does not wait for some things."""

    def __init__(self, inner: Any, name: str, skips: Callable[..., bool] = lambda *arguments: True) -> None:
        self._inner, self._name, self._skips = inner, name, skips

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._inner, name)
        if name != self._name:
            return original
        return lambda *arguments: None if self._skips(*arguments) else original(*arguments)


def encoder_reads_at_once(patch: pytest.MonkeyPatch) -> None:
    """Rule 2: an encoder reads weights before their update is complete."""
    main = WeightEncoder._main

    def hasty(encoder: WeightEncoder, index: int) -> None:
        mine = copy.copy(encoder)
        mine._ordering = Hasty(encoder._ordering, "before_upload")
        main(mine, index)

    patch.setattr(WeightEncoder, "_main", hasty)


def space_taken_at_once(patch: pytest.MonkeyPatch) -> None:
    """The optimizer's thread writes to an encoder's space that may be in use."""
    before_change = WeightEncoder.before_change

    def hasty(encoder: WeightEncoder, *arguments: Any) -> None:
        mine = copy.copy(encoder)
        mine._board = Hasty(encoder._board, "wait", _is(SPACE_FREE))
        before_change(mine, *arguments)

    patch.setattr(WeightEncoder, "before_change", hasty)


def evaluated_before_the_weights_came(patch: pytest.MonkeyPatch) -> None:
    """The controller learns that rewritten weights are there, but not by their hand-over.

    It polls, which orders nothing: an engine that ended before they came would end the other machine's too.
    """
    share = WeightExchange.share_rewritten

    def hasty(exchange: WeightExchange, version: int, wait: Any) -> None:
        def poll(key: HandOverKey[Any]) -> None:
            while not exchange._board.ready(key):
                exchange._board.raise_if_stopped()
                time.sleep(0.001)

        share(exchange, version, poll)

    patch.setattr(WeightExchange, "share_rewritten", hasty)


def _is(kind: Any) -> Callable[[HandOverKey[Any]], bool]:
    return lambda key: key.kind is kind


@pytest.mark.parametrize("plant", [encoder_reads_at_once, space_taken_at_once])
def test_each_wait_of_the_encoders_orders_something(plant, monkeypatch) -> None:
    plant(monkeypatch)
    assert races(SYNC, lr=1e-2) != []


def test_evaluations_wait_for_rewritten_weights_and_these_for_evaluations(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        evaluated_before_the_weights_came(patch)
        assert races(ASYNC_PREDICT, validates=True) != []
    monkeypatch.setattr(Ordering, "before_rewrite", lambda *arguments: None)
    assert races(ASYNC_PREDICT, validates=True) != []

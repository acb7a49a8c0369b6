"""The race checker finds nothing on any of several machines, and a race for each wait of the exchange that is removed.

Each machine's run is judged by itself, by what was synchronised and not by what happened to run first.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.machines import run_machines
from tests.support.shared_steps import Case
from tests.support.toy import PARTITIONS, toy_batches, toy_model
from torchround.engine.exchange.gradients import GradientSender
from torchround.engine.exchange.weights import WeightExchange
from torchround.engine.ordering import GRADIENT_LANDED, Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races
from torchround.machines.group import MachineGroup

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (8, 2, 5, 8), strict=True)]


def races(case: Case, num_machines: int) -> list[Any]:
    """Return the races of all machines of a recorded run."""

    def run(group: MachineGroup) -> list[Any]:
        log = AccessLog()
        case.run(group, log)
        return find_races(log.entries)

    return [race for found in run_machines(num_machines, run) for race in found]


@pytest.mark.parametrize("num_machines", [2, 3])
@pytest.mark.parametrize("policy", [SYNC, ASYNC, ASYNC_PREDICT], ids=["sync", "async", "predict"])
def test_no_race_on_any_machine(policy, num_machines):
    case = Case(
        UNEVEN,
        lambda: toy_model(tied=True),
        PARTITIONS["backward coarser"],
        num_devices=3,
        rounds=2,
        dtype=torch.bfloat16,
        store={"policy": policy},
        evaluates=True,
    )
    assert races(case, num_machines) == []


def test_no_race_around_steps_that_are_skipped():
    def poison(store) -> None:
        for device_weights in store.bundles[1].device_weights:
            device_weights.fill_(torch.inf)

    assert races(Case(UNEVEN[:3], store={"policy": ASYNC}, before=poison), 2) == []


# Each removed wait, for one machine's threads of the exchange alone where others use it too.


def removed(owner: type, name: str, answer: Any = None) -> Callable[[pytest.MonkeyPatch], None]:
    """Let a wait return at once."""
    return lambda patch: patch.setattr(owner, name, lambda *arguments: answer)


def for_sender_or_receiver(name: str, wait: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Let one wait of `WeightExchange`'s method `name` return at once; other callers of it wait as ever."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(WeightExchange, name)

        class Hasty:
            def __init__(self, ordering: Ordering) -> None:
                self._ordering = ordering

            def __getattr__(self, called: str) -> Any:
                return (lambda *arguments: None) if called == wait else getattr(self._ordering, called)

        def without(exchange: WeightExchange, *arguments: Any) -> None:
            if not isinstance(exchange._ordering, Hasty):
                exchange._ordering = Hasty(exchange._ordering)
            original(exchange, *arguments)

        patch.setattr(WeightExchange, name, without)

    return plant


def gradient_sent_before_it_landed(patch: pytest.MonkeyPatch) -> None:
    """Rule 3: a sender reads a part once its download is enqueued."""
    send = GradientSender._send_part

    def sending(sender: GradientSender, bundle: Any, step: int, part: int) -> None:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(
                sender._ordering,
                "before_gradient_read",
                lambda *key: sender._board.wait(GRADIENT_LANDED(*[key[1], key[0], key[2]]))[1],
            )
            send(sender, bundle, step, part)

    patch.setattr(GradientSender, "_send_part", sending)


def consumed_before_it_is_sent(patch: pytest.MonkeyPatch) -> None:
    """Rule 4: a sender says that it has read a part before it reads it."""
    send = GradientSender._send_part

    def sending(sender: GradientSender, bundle: Any, step: int, part: int) -> None:
        sender._ordering.part_consumed(bundle.index, step, part)
        send(sender, bundle, step, part)

    patch.setattr(GradientSender, "_send_part", sending)


PLANTS = {
    "rule 1 before weights are received": for_sender_or_receiver("_receive", "before_device_weight_write"),
    "rule 2 before weights are sent": for_sender_or_receiver("_send", "before_upload"),
    "rule 3 before a gradient is sent": gradient_sent_before_it_landed,
    "rule 4 after a gradient is sent": consumed_before_it_is_sent,
    "rule 7": removed(Ordering, "before_overwriting_sent"),
    "rule 8": removed(Ordering, "_before_landing", ()),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_each_wait_of_the_exchange_orders_something(monkeypatch, plant):
    PLANTS[plant](monkeypatch)
    found = []
    for policy in (SYNC, ASYNC):
        found += races(Case(UNEVEN, num_devices=2, store={"policy": policy}, evaluates=True), 3)
    assert found != []

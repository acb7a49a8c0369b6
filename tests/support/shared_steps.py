"""Steps of the toy model on several machines, as threads of a test, and on one machine with as many rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.machines import run_machines
from tests.support.toy import OPTIMIZER, PARTITIONS, linked, toy_engine, toy_model, toy_store, watched
from torchround.config import OptimizerTable
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.ownership import Ownership
from torchround.engine.update_report import UpdateReport
from torchround.layer import LayeredModel, MicroBatch
from torchround.machines.group import MachineGroup
from torchround.optim import SpikeBounds, make_optimizer
from torchround.pipeline.machine_shares import step_share
from torchround.pipeline.partition import Partition


@dataclass
class Outcome:
    """What a run left: each step's loss and update, its part of a checkpoint, and all device weights by bundle."""

    losses: list[float]
    updates: list[UpdateReport]
    views: dict[str, Tensor]
    device_weights: list[list[Tensor]]
    state: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run of a small model. `model` makes it; `rounds` are those of each machine.

    `optimizer` is None for the default one of the toy model. `store` are options of the host store, `spikes` the arguments
    of its `SpikeBounds`; `before` may change its weights.
    If it `evaluates`, each machine evaluates some of a batch beside the second step; with `true_weights`, after each step at
    the true weights and before. `begin` gets each machine's own store
    and its group before the first step.
    """

    batches: Sequence[Sequence[MicroBatch]]
    model: Callable[[], LayeredModel] = toy_model
    partition: Partition = PARTITIONS["forward coarser"]
    num_devices: int = 2
    rounds: int = 1
    dtype: torch.dtype = torch.float32
    optimizer: OptimizerTable | None = None
    store: Mapping[str, Any] = field(default_factory=dict)
    spikes: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[HostStore], None] = lambda store: None
    begin: Callable[[HostStore, MachineGroup | None], None] = lambda store, group: None
    evaluates: bool = False
    true_weights: bool = False
    lr: float = 1e-2

    def run(self, group=None, log=None):
        """Train on this machine of a group, or alone. `log` records the run for the race checker."""
        rank, size = (group.rank, group.size) if group is not None else (0, 1)
        model, table = self.model(), self.optimizer or OPTIMIZER
        options = {**self.store, "optimizer": make_optimizer(table)}
        # Filled as one machine fills it: what others own is dropped.
        whole = toy_store(model, self.dtype, **options)
        self.before(whole)
        spikes = SpikeBounds(*self.spikes)
        store = HostStore(model, self.dtype, **options, spikes=spikes, ownership=Ownership(rank, size))
        copy_state(whole, store)
        self.begin(store, group)
        engine = toy_engine(
            *(model, store, self.partition, self.num_devices),
            observer=log,
            wrap=lambda device: device if log is None else watched(linked(device), log),
            machines=group,
            optimizer=table,
            rounds=self.rounds,
            **self.settings,
        )
        with engine:
            results = train_shared(engine, self.batches, rank, size, self.evaluates, self.lr, self.true_weights)
            losses, updates = [result.loss() for result in results], [result.update() for result in results]
        weights = [[v.clone() for v in bundle.device_weights] for bundle in store.bundles]
        return Outcome(losses, updates, dict(store.named_views()), weights, store.resume_state())


def copy_state(source, target):
    """Copy a whole store into the part of it that a machine holds."""
    for theirs, ours in zip(source.bundles, target.bundles, strict=True):
        if ours.is_owned:
            for there, here in zip(theirs.state(), ours.state(), strict=True):
                here.copy_(there)
        for there, here in zip(theirs.device_weights, ours.device_weights, strict=True):
            here.copy_(there)


def train_shared(engine, batches, rank, size, evaluates=False, lr=1e-2, true_weights=False):
    """Train on this machine's share of each batch."""
    results = []
    for step, batch in enumerate(batches):
        if evaluates and step == 1:
            engine.evaluate(batch[:1])  # not awaited, so that it runs beside the step
        share = step_share(len(batch), engine.settings.rounds, rank, size)
        num_labels = sum(micro_batch.num_labels() for micro_batch in batch)
        own = [batch[index] for index in share.micro_batches]
        results.append(engine.forward_backward(own, share, num_labels))
        engine.step(lr)
        if true_weights:  # neither evaluation is awaited
            engine.drain()
            engine.evaluate(batch[:1])
            with engine.true_device_weights():
                engine.evaluate(batch[:1])
    engine.drain()
    return results


def assert_equal_to_one_machine(case, num_machines):
    """Assert that machines of a case leave the bits that one machine with as many rounds leaves."""
    alone = replace(case, rounds=case.rounds * num_machines).run()
    machines = run_machines(num_machines, case.run)
    together = {}
    for found in machines:
        assert list(map(str, found.losses)) == list(map(str, alone.losses))  # NaN differs from itself
        for update, expected in zip(found.updates, alone.updates, strict=True):
            assert figures(update) == figures(expected)
        assert not together.keys() & found.views.keys(), "two machines save the same tensor"
        together |= found.views
        assert found.state == alone.state
        for ours, expected in zip(found.device_weights, alone.device_weights, strict=True):
            assert all(map(same_bits, ours, expected))
    assert together.keys() == alone.views.keys()
    different = [name for name in together if not same_bits(together[name], alone.views[name])]
    assert not different, f"{len(different)} of {len(together)} tensors differ: {different[:5]}"
    return machines


def same_bits(one, other):
    """Compare as bytes, because a value that is not finite differs from itself."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def figures(update):
    """Return what an update says beside its times; strings, because NaN differs from itself."""
    return (
        str(update.loss),
        str(update.grad_norm),
        *(update.skipped, update.loss_scale, update.fault, update.not_finite),
    )

"""Every optimizer and state format on several machines: the bits of one machine, also resumed, and no race on any."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from tests.engine.exchange.test_machine_races import races
from tests.support.machines import run_machines
from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.small_decoders import small_decoder
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_model
from torchround.checkpoint import Checkpointer, MachineTeam, load_checkpoint
from torchround.engine.exchange.start import share_weights
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, BOUNDED, SYNC
from torchround.pipeline.partition import Partition
from torchround.run.saved_forms import SavedForms

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (7, 2, 5, 8), strict=True)]
NAMES = [
    pytest.param(name, marks=() if name in ("adamw compact", "muon") else pytest.mark.nightly) for name in OPTIMIZERS
]
MODES = [(name, policy) for name in OPTIMIZERS for policy in POLICIES[name] if policy is not BOUNDED]


def label(value):
    return value.name + "-predict" * value.predicts if hasattr(value, "predicts") else None


tied_model = partial(toy_model, True)
experts = partial(small_decoder, "qwen3", "debug_moe")


def case(name, policy, build=tied_model, **options):
    return Case(
        UNEVEN,
        build,
        PARTITIONS["backward coarser"] if build is tied_model else Partition((1, 2), 1, (2, 1)),
        dtype=torch.bfloat16,
        optimizer=OPTIMIZERS[name],
        store={"policy": policy},
        **options,
    )


@pytest.mark.parametrize("num_machines", [2, 3])
@pytest.mark.parametrize(("name", "policy"), MODES, ids=label)
def test_machines_give_the_bits_of_one(name, policy, num_machines):
    found = assert_equal_to_one_machine(case(name, policy, rounds=num_machines - 1), num_machines)
    if not policy.predicts:
        assert any(key.startswith("residual/") for key in found[0].views), "the weights are not split"
    if name.startswith("muon"):
        matrices = [{key for key in machine.views if key.startswith("momentum_buffer/")} for machine in found]
        assert all(matrices), "a machine owns no matrix"


@pytest.mark.parametrize("name", NAMES)
def test_no_race_on_any_machine(name):
    assert races(case(name, ASYNC, num_devices=2, evaluates=True), 2) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["before_overwriting_sent", "_before_landing"])
def test_rules_7_and_8_are_needed(monkeypatch, name, rule):
    monkeypatch.setattr(Ordering, rule, lambda *_: ())
    found = []
    for policy in (SYNC, ASYNC):
        found += races(case(name, policy, evaluates=True), 3)
    assert found != []


@pytest.fixture(scope="module")
def uninterrupted():
    """Return the outcome of a case on one machine, with six rounds and without a checkpoint. Each is run once."""
    return cache(lambda name, policy, build: case(name, policy, build, rounds=6).run())


# A step has six rounds in all.
@pytest.mark.parametrize(
    ("build", "savers", "loaders"),
    [(tied_model, 1, 3), (tied_model, 2, 3), (tied_model, 3, 1), (experts, 3, 2)],
    ids=["tied, 1 to 3", "tied, 2 to 3", "tied, 3 to 1", "experts, 3 to 2"],
)
@pytest.mark.parametrize(("name", "policy"), [mode for mode in MODES if mode[0] != "adamw"], ids=label)
def test_other_machines_resume_with_the_bits_of_a_run_that_never_stopped(
    tmp_path, uninterrupted, name, policy, build, savers, loaders
):
    whole, parts = uninterrupted(name, policy, build), case(name, policy, build)

    def save(group):
        begun = replace(parts, batches=UNEVEN[:2], rounds=6 // savers).run(group)
        Checkpointer(tmp_path, team=MachineTeam.of(group)).save(2, begun.views, begun.state)
        return begun

    def resume(store, group):
        views, forms = store.loadable_views(), SavedForms.of(store)
        loaded = load_checkpoint(tmp_path / "step-2", views, team=MachineTeam.of(group), converter=forms)
        assert not loaded.converted
        state = {key: value for key, value in loaded.state.items() if key != "step"}
        store.resume(2, **state)
        share_weights(store, group)

    rest = replace(parts, batches=UNEVEN[2:], rounds=6 // loaders, begin=resume)
    begun, found = run_machines(savers, save), run_machines(loaders, rest.run)
    together = {}
    for outcome in found:
        assert begun[0].losses + outcome.losses == whole.losses
        assert outcome.state == whole.state
        together |= outcome.views
        for ours, expected in zip(outcome.device_weights, whole.device_weights, strict=True):
            assert all(map(torch.equal, ours, expected))
    assert_same_state(together, whole.views)

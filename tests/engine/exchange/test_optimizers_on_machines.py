"""Optimizers and state formats on several machines, resumed on others."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.machines import run_machines
from tests.support.optimizers import OPTIMIZERS
from tests.support.shared_steps import Case
from tests.support.small_decoders import small_decoder
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_model
from torchround.checkpoint import Checkpointer, MachineTeam, load_checkpoint
from torchround.engine.exchange.start import share_weights
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.pipeline.partition import Partition
from torchround.run.saved_forms import SavedForms

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (6, 1, 3, 7), strict=True)]

tied_model = partial(toy_model, True)
experts = partial(small_decoder, "qwen3", "debug_moe")


def case(name, policy, build, **options):
    return Case(
        UNEVEN,
        build,
        PARTITIONS["backward coarser"] if build is tied_model else Partition((1, 2), 1, (2, 1)),
        dtype=torch.bfloat16,
        optimizer=OPTIMIZERS[name],
        store={"policy": policy},
        **options,
    )


# A step has six rounds in all.
@pytest.mark.parametrize(
    ("name", "policy", "build", "savers", "loaders"),
    [
        pytest.param("adamw compact", SYNC, tied_model, 1, 3, marks=pytest.mark.nightly),
        ("adamw compact", ASYNC_PREDICT, tied_model, 2, 3),
        ("muon", ASYNC, tied_model, 3, 1),
        pytest.param("muon compact", SYNC, experts, 3, 2, marks=pytest.mark.nightly),
    ],
)
def test_other_machines_resume_with_the_bits_of_a_run_that_never_stopped(
    tmp_path, name, policy, build, savers, loaders
):
    whole, parts = case(name, policy, build, rounds=6).run(), case(name, policy, build)

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

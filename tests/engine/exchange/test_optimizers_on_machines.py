"""Optimizers and state formats on several machines, resumed on others."""

from dataclasses import replace

import pytest

from tests.support.engine_rows import Row, assert_same, together
from tests.support.machines import run_machines
from tests.support.toy import toy_batches
from torchround.checkpoint import Checkpointer, MachineTeam, load_checkpoint
from torchround.checkpoint.folders import checkpoint_name

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(3, 8), (6, 1, 7), strict=True)]


def row(update, optimizer, **options):
    return Row(2, cut="backward", update=update, optimizer=optimizer, dtype="bf16", batches=UNEVEN, **options)


# A step has six rounds in all.
@pytest.mark.parametrize(
    ("row", "savers", "loaders"),
    [
        pytest.param(row("sync", "adamw8", tied=True), 1, 3, marks=pytest.mark.nightly),
        (row("predict", "adamw8", tied=True), 2, 3),
        (row("async", "muon", tied=True), 3, 1),
        pytest.param(row("sync", "muon8", experts=True), 3, 2, marks=pytest.mark.nightly),
    ],
    ids=lambda value: f"{value.update} {value.optimizer}" if isinstance(value, Row) else None,
)
def test_other_machines_resume_with_the_bits_of_a_run_that_never_stopped(tmp_path, row, savers, loaders):
    def save(group):
        begun = replace(row, batches=UNEVEN[:2], rounds=6 // savers).run(group)
        Checkpointer(tmp_path, team=MachineTeam.of(group)).save(2, begun.state, begun.resume)
        return begun

    def resume(group):
        def load(store):
            path = tmp_path / checkpoint_name(2)
            loaded = load_checkpoint(path, store.loadable_views(), team=MachineTeam.of(group))
            store.resume(**{"step": 2} | loaded.state)

        return replace(row, batches=UNEVEN[2:], rounds=6 // loaders).run(group, load)

    begun = together(run_machines(savers, save))
    found = together(run_machines(loaders, resume))
    assert_same(found.after(replace(begun, evaluated=[])), replace(row, rounds=6).run())

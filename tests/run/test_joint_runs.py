"""Runs of several machines: their folder, what they save and resume with, and which machine does what."""

import errno
import fcntl
import logging
import os
from functools import partial
from zlib import crc32

import pytest
import torch

from tests.support.machines import run_machines
from tests.support.optimizers import OPTIMIZERS
from tests.support.small_decoders import small_decoder
from tests.support.toy import toy_model, toy_store
from torchround.checkpoint import Checkpointer, MachineTeam, load_checkpoint
from torchround.config import Config, RunTable
from torchround.engine.exchange import share_weights
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC, Ownership
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import LaunchError
from torchround.optim.optimizer import make_optimizer
from torchround.run.checkpoints import RETRY_S, RunCheckpoints, RunPosition, save_with_patience
from torchround.run.early_end import BadStepsError
from torchround.run.run_folder import RunFolder
from torchround.run.saved_forms import SavedForms
from torchround.run.validation import joint_losses

STEP = 7
nightly = pytest.mark.nightly
adapted_model = partial(small_decoder, "llama3", "debug", ("q_proj", "v_proj"))


def trained_store(model, dtype, policy, rank=0, size=1, optimizer=None):
    """Return a machine's part of a store as some steps could have left it: every value is drawn by its name."""
    store = toy_store(model, dtype, policy=policy, ownership=Ownership(rank, size), optimizer=optimizer)
    store.step = STEP
    views = {**store.named_views(), **{f"weights/{name}": view for name, view in store.weights().items()}}
    for name, view in views.items():
        drawn = torch.rand(view.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        view.copy_(drawn if view.is_floating_point() else drawn * 127)  # codes and residuals are integers
    store.prediction = 1e-3 if policy.predicts else None
    store.resume(STEP, STEP, prediction=store.prediction and {"lr": store.prediction})
    return store


# Model, and the dtype, policy and optimizer that save and those that load: the same, or another form of state.
JOINT = {
    "tied, muon, compact": (partial(toy_model, True), (torch.float32, ASYNC, "muon compact"), None),
    "predicting, compact": (toy_model, (torch.bfloat16, ASYNC_PREDICT, "adamw compact"), None),
    "experts, muon": (partial(small_decoder, "qwen3", "debug_moe"), (torch.bfloat16, SYNC, "muon"), None),
    "adapters": (adapted_model, (torch.bfloat16, ASYNC, "adamw"), None),
    "adamw to compact": (toy_model, (torch.bfloat16, ASYNC, "adamw"), (torch.float32, SYNC, "adamw compact")),
    "muon to exact": (toy_model, (torch.bfloat16, ASYNC, "muon compact"), (torch.bfloat16, ASYNC, "muon")),
    "split to fp32": (toy_model, (torch.bfloat16, ASYNC, "muon compact"), (torch.float32, SYNC, "muon compact")),
}
BY_DEFAULT = ("tied, muon, compact", "predicting, compact", "adamw to compact")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else nightly) for name in JOINT])
def test_four_machines_save_and_one_two_and_three_hold_the_same_bits_again_in_the_same_form_or_another(tmp_path, name):
    build, was, is_now = JOINT[name]
    dtype, policy, of_saved = was
    optimizer = make_optimizer(OPTIMIZERS[of_saved])

    def save(group):
        store = trained_store(build(), dtype, policy, group.rank, group.size, optimizer)
        Checkpointer(tmp_path, team=MachineTeam.of(group)).save(STEP, store.named_views(), store.resume_state())

    def restore(group=None):
        dtype, policy, loads = is_now or was
        ownership = Ownership(group.rank, group.size) if group else None
        store = HostStore(
            build(), dtype, policy=policy, ownership=ownership, optimizer=make_optimizer(OPTIMIZERS[loads])
        )
        options = {"team": MachineTeam.of(group)} if group else {}
        optional = lambda name: is_now is not None and name.startswith("master_")
        options |= {"converter": SavedForms.of(store), "optional": optional}
        loaded = load_checkpoint(tmp_path / f"step-{STEP}", store.loadable_views(), **options)
        store.resume(loaded.step, loaded.state["applied_updates"], prediction=loaded.state.get("prediction"))
        if group:
            share_weights(store, group)
        else:
            assert bool(loaded.converted) == (is_now is not None)
        return store

    run_machines(4, save)
    alone = restore()
    expected = alone if is_now else trained_store(build(), dtype, policy, optimizer=optimizer)
    for stores in ([alone], run_machines(2, restore), run_machines(3, restore)):
        together = {}
        for store in stores:
            together |= store.named_views()
            for ours, theirs in zip(store.bundles, expected.bundles, strict=True):
                assert all(map(torch.equal, ours.device_weights, theirs.device_weights))
        assert together.keys() == expected.named_views().keys()
        assert all(torch.equal(view, together[name]) for name, view in expected.named_views().items())


def entered(folder, shared, hold):
    def enter(group):
        own = folder if shared else folder / f"disk{group.rank}"
        with RunFolder(RunTable(name="run", folder=str(own)), team=MachineTeam.of(group, shared)) as entered:
            result = hold(entered)
            group.channel("saves").gather(None, "the end of the test")
            return result

    return enter


def is_locked(folder):
    with open(folder / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def refusals(function):
    def refused(group):
        with pytest.raises(LaunchError) as caught:
            function(group)
        return str(caught.value)

    return run_machines(2, refused)


def test_machines_lock_a_shared_folder_once_and_own_ones_each(tmp_path):
    assert run_machines(2, entered(tmp_path, True, lambda folder: is_locked(folder.path))) == [True, True]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"], "no mark is left"
    assert run_machines(2, entered(tmp_path, False, lambda folder: is_locked(folder.path))) == [True, True]
    assert not is_locked(tmp_path / "disk1" / "run")


def test_a_folder_in_use_is_refused_on_all_machines_with_one_message(tmp_path):
    with RunFolder(RunTable(name="run", folder=str(tmp_path))):
        messages = refusals(entered(tmp_path, True, pytest.fail))
    holder = f"is in use by process {os.getpid()}"
    assert len(set(messages)) == 1 and messages[0].startswith("machine 0 (node0): ") and holder in messages[0]


def test_a_folder_that_is_not_shared_as_the_config_says_is_refused_on_all(tmp_path):
    def apart(group):
        RunFolder(
            RunTable(name="run", folder=str(tmp_path / f"disk{group.rank}")), team=MachineTeam.of(group)
        ).__enter__()

    messages = refusals(apart)
    assert all("on machine 0 (node0) is not the folder of machine 1 (node1)" in text for text in messages)
    assert not list(tmp_path.glob("disk*/run")), "nothing is left behind"

    def together(group):
        table = RunTable(name="run", folder=str(tmp_path))
        RunFolder(table, team=MachineTeam.of(group, shares_folder=False)).__enter__()

    messages = refusals(together)
    assert all("is one folder on machine 0 (node0) and machine 1 (node1)" in text for text in messages)


def checkpoints_of(folder, group, **table):
    tables = {
        "run": {"name": "run", "folder": str(folder)},
        "model": {"family": "llama3", "flavor": "debug"},
        "data": {"sources": [{"path": "text.jsonl"}]},
        "training": {"steps": 9, "seq_len": 16, "global_batch_size": 2, "micro_batch_size": 1},
    }
    config = Config.model_validate({**tables, "checkpoint": table})
    return RunCheckpoints(config, RunFolder(config.run, team=MachineTeam.of(group)))


class FullAtFirst(Checkpointer):
    """Checkpoints on a disk that is full for the first `full_tries` saves."""

    full_tries = 0

    def clear_leftovers(self):
        self.full_tries -= 1
        if self.full_tries >= 0:
            raise OSError(errno.ENOSPC, "planted")
        super().clear_leftovers()


def test_all_machines_wait_for_space_on_one_disk(tmp_path):
    def save(group):
        checkpointer = FullAtFirst(tmp_path / f"disk{group.rank}", team=MachineTeam.of(group, shares_folder=False))
        checkpointer.full_tries = 2 * group.rank  # machine 1's disk
        slept = []
        save_with_patience(lambda: checkpointer.save(1, {f"weights/{group.rank}": torch.ones(3)}, {}), slept.append)
        return slept

    assert run_machines(2, save) == [[RETRY_S, RETRY_S]] * 2


def test_the_best_checkpoint_is_known_to_a_machine_whose_disk_is_new(tmp_path):
    def losses(group):
        team = MachineTeam.of(group, shares_folder=False)
        own = Checkpointer(tmp_path / f"disk{group.rank}", team=team)
        for step, loss in ((1, 0.5), (2, 0.75)):
            progress = {"loss": loss, "best_loss": 0.5, "best_step": 1, "since_best": step - 1}
            own.save(step, {f"weights/{group.rank}": torch.ones(3)}, {"validation": progress})
        group.channel("saves").gather(None, "the end of the saves")
        seen = Checkpointer(tmp_path / ("new" if group.rank == 0 else "disk1"), team=team)
        return joint_losses(seen)

    assert run_machines(2, losses) == [{1: 0.5, 2: 0.75}] * 2


@pytest.mark.parametrize(("error", "told"), [(RuntimeError, 1), (BadStepsError, 0)])
def test_a_fault_of_several_machines_saves_nothing_and_bad_steps_are_none(tmp_path, caplog, error, told):
    def fault(group):
        checkpoints = checkpoints_of(tmp_path, group)
        store = trained_store(toy_model(), torch.float32, SYNC, group.rank, group.size)
        checkpoints.positions.append(RunPosition(STEP, 0, {}))
        checkpoints.rescue(store, error("planted"))

    with caplog.at_level(logging.WARNING):
        run_machines(2, fault)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert caplog.text.count("spread over 2 machines") == told, "machine 0 tells it"
    assert caplog.text.count("there is no checkpoint") == told

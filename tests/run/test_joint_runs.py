"""Runs of several machines: their folder, what they save and resume with, and which machine does what."""

import errno
import fcntl
import logging
import os
import socket
from functools import partial
from zlib import crc32

import pytest
import torch

from tests.support.machines import run_machines
from tests.support.optimizers import OPTIMIZERS
from tests.support.small_decoders import small_decoder
from tests.support.toy import toy_model, toy_store
from torchround.checkpoint import Checkpointer, MachineTeam, load_checkpoint
from torchround.checkpoint.checkpointer import RETRY_S, save_with_patience
from torchround.checkpoint.folders import checkpoint_name
from torchround.config import Config, RunTable
from torchround.engine.exchange import share_weights
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import LaunchError
from torchround.optim.optimizer import make_optimizer
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, SYNC
from torchround.run.checkpoints import RunCheckpoints, RunPosition
from torchround.run.early_end import BadStepsError
from torchround.run.run_folder import RunFolder

STEP = 7
nightly = pytest.mark.nightly
adapted_model = partial(small_decoder, "llama3", "debug", ("q_proj", "v_proj"))


def trained_store(model, dtype, mode, rank=0, size=1, optimizer=None):
    store = toy_store(model, dtype, mode=mode, ownership=Ownership(rank, size), optimizer=optimizer)
    store.step = STEP
    views = {**store.named_views(), **{f"weights/{name}": view for name, view in store.weights().items()}}
    for name, view in views.items():
        drawn = torch.rand(view.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
        view.copy_(drawn if view.is_floating_point() else drawn * 127)  # codes and residuals are integers
    store.prediction = 1e-3 if mode.predicts else None
    store.resume(STEP, STEP, prediction=store.prediction and {"lr": store.prediction})
    return store


# Model, and the dtype, mode and optimizer of its store.
JOINT = {
    "tied, muon, compact": (partial(toy_model, True), torch.float32, ASYNC, "muon compact"),
    "predicting, compact": (toy_model, torch.bfloat16, ASYNC_PREDICT, "adamw compact"),
    "experts, muon": (partial(small_decoder, "qwen3", "debug_moe"), torch.bfloat16, SYNC, "muon"),
    "adapters": (adapted_model, torch.bfloat16, ASYNC, "adamw"),
}
BY_DEFAULT = ("tied, muon, compact", "predicting, compact")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else nightly) for name in JOINT])
def test_four_machines_save_and_one_two_and_three_hold_the_same_bits_again(tmp_path, name):
    build, dtype, mode, of_saved = JOINT[name]
    optimizer = make_optimizer(OPTIMIZERS[of_saved])

    def save(group):
        store = trained_store(build(), dtype, mode, group.rank, group.size, optimizer)
        Checkpointer(tmp_path, team=MachineTeam.of(group)).save(STEP, store.named_views(), store.resume_state())

    def restore(group=None):
        ownership = Ownership(group.rank, group.size) if group else None
        store = HostStore(build(), dtype, mode=mode, ownership=ownership, optimizer=optimizer)
        path = tmp_path / checkpoint_name(STEP)
        loaded = load_checkpoint(path, store.loadable_views(), team=MachineTeam.of(group))
        store.resume(loaded.step, loaded.state["applied_updates"], prediction=loaded.state.get("prediction"))
        if group:
            share_weights(store, group)
        return store

    run_machines(4, save)
    expected = trained_store(build(), dtype, mode, optimizer=optimizer)
    for stores in ([restore()], run_machines(2, restore), run_machines(3, restore)):
        together = {}
        for store in stores:
            together |= store.named_views()
            for ours, theirs in zip(store.bundles, expected.bundles, strict=True):
                assert all(map(torch.equal, ours.device_weights, theirs.device_weights))
        assert together.keys() == expected.named_views().keys()
        assert all(torch.equal(view, together[name]) for name, view in expected.named_views().items())


def entered(folder, hold):
    def enter(group):
        with RunFolder(RunTable(name="run", folder=str(folder)), team=MachineTeam.of(group)) as entered:
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


def test_machines_lock_their_folder_once(tmp_path):
    assert run_machines(2, entered(tmp_path, lambda folder: is_locked(folder.path))) == [True, True]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"]
    assert not is_locked(tmp_path / "run")


def test_a_folder_in_use_is_refused_on_all_machines_with_one_message(tmp_path):
    with RunFolder(RunTable(name="run", folder=str(tmp_path))):
        messages = refusals(entered(tmp_path, pytest.fail))
    holder = f"is in use by process {os.getpid()} on {socket.gethostname()}"
    assert len(set(messages)) == 1 and messages[0].startswith("machine 0 (node0): ") and holder in messages[0]


def test_a_folder_that_is_not_shared_is_refused_on_all(tmp_path):
    def apart(group):
        entered(tmp_path / f"disk{group.rank}", pytest.fail)(group)

    messages = refusals(apart)
    assert all("machine 1 (node1): run.folder: " in text for text in messages)
    assert all("is not the folder of machine 0 (node0)" in text for text in messages)
    assert not (tmp_path / "disk1" / "run").exists(), "nothing is left behind"


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
    full_tries = 0

    def clear_leftovers(self):
        self.full_tries -= 1
        if self.full_tries >= 0:
            raise OSError(errno.ENOSPC, "planted")
        super().clear_leftovers()


def test_all_machines_wait_for_space(tmp_path):
    def save(group):
        checkpointer = FullAtFirst(tmp_path, team=MachineTeam.of(group))
        checkpointer.full_tries = 2  # the folder is machine 0's to make
        slept = []
        save_with_patience(lambda: checkpointer.save(1, {f"weights/{group.rank}": torch.ones(3)}, {}), slept.append)
        return slept

    assert run_machines(2, save) == [[RETRY_S, RETRY_S]] * 2


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

"""What a checkpoint of several machines is to whatever reads one, and a checkpoint of one machine to several."""

import json
from types import SimpleNamespace

import torch

from tests.support.machines import run_machines
from tests.support.small_run import ASYNC, COMPACT, STEPS, files_of, fp32_weights, stop_after, tensors_in
from torchround.checkpoint import Checkpointer, MachineTeam
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf
from torchround.commands.configured_model import build_model, starting_weights
from torchround.commands.manage_checkpoints import main as manage
from torchround.config import parse_command_line
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_store import HostStore
from torchround.planning.update_modes import MODES
from torchround.run.checkpoints import RunCheckpoints, given_folder
from torchround.run.run_folder import RunFolder

BYTES_VOCABULARY = 259


def saved_again_by_three(path):
    tensors = tensors_in(path)
    state, manifest = (json.loads((path / f"{name}.json").read_text()) for name in ("state", "manifest"))

    def layer_of(name):
        return name.split("/")[1].removeprefix("block.").split(".")[0]

    layers = sorted({layer_of(name) for name in tensors})

    def save(group):
        own = {name: t for name, t in tensors.items() if layers.index(layer_of(name)) % 3 == group.rank}
        Checkpointer(path.parent, team=MachineTeam.of(group)).save(manifest["step"], own, state)

    run_machines(3, save)
    assert len(list(path.glob("*.safetensors"))) == 3


def test_a_run_on_one_machine_continues_from_a_checkpoint_of_three_with_the_same_bits(small_runs):
    assert small_runs("whole", ASYNC) == 0
    stop_after(3, small_runs, "run", ASYNC)
    saved_again_by_three(small_runs.checkpoint("run", 3))
    assert small_runs("run", ASYNC) == 0
    small_runs.assert_same("run", "whole", STEPS)


def test_commands_read_a_checkpoint_of_three(small_runs, capsys):
    assert small_runs("run") == 0
    path = small_runs.checkpoint("run", STEPS)
    export_hf.export(path, small_runs.folder / "before")
    saved_again_by_three(path)
    export_hf.export(path, small_runs.folder / "after")
    assert files_of(small_runs.folder / "after") == files_of(small_runs.folder / "before")
    capsys.readouterr()
    assert manage(["verify", str(path)]) == 0 and manage(["list", str(path.parent)]) == 0
    assert "complete" in capsys.readouterr().out


def options_of(*overrides):
    return parse_command_line(["--config", "small.toml", *overrides])


def machine_store(options, group):
    model = build_model(options, BYTES_VOCABULARY)
    mode = MODES[options.config.engine.update]
    return HostStore(model, torch.float32, mode=mode, ownership=Ownership(group.rank, group.size))


def checkpoints_of(options, group):
    return RunCheckpoints(options.config, RunFolder(options.config.run, team=MachineTeam.of(group)))


def test_two_machines_continue_from_a_checkpoint_of_one_or_begin_with_its_weights(small_runs):
    assert small_runs("run", ASYNC) == small_runs("compact", "--training.dtype=bfloat16", COMPACT) == 0
    uncorrected = (ASYNC, "--engine.delay_correction=none", "--training.steps=9")

    def restore(group, name, *overrides):
        load = f"--checkpoint.load_path=outputs/{name}/checkpoints/{checkpoint_name(STEPS)}"
        options, positions = options_of("--run.name=other", load, *overrides), []
        store, checkpoints = machine_store(options, group), checkpoints_of(options, group)
        if not checkpoints.restore(store, SimpleNamespace(load_state_dict=positions.append, state_dict=dict)):
            folder, model = given_folder(options.config), build_model(options, BYTES_VOCABULARY)
            with store.writing() as weights:
                starting_weights(folder, model, {}).load(weights)
            return {**store.weights()}
        assert checkpoints.position.step == store.step == STEPS
        assert positions == [small_runs.saved_state(name)["data"]]
        return store.named_views()

    weights = {name.removeprefix("weights/"): view for name, view in fp32_weights(small_runs.state("compact")).items()}
    for name, overrides, expected in (
        ("run", uncorrected, small_runs.state("run")),
        ("compact", ["--checkpoint.load=weights"], weights),
    ):
        first, second = run_machines(2, lambda group: restore(group, name, *overrides))  # noqa: B023
        assert first and second and not first.keys() & second.keys()
        assert (first | second).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in (first | second).items())


def test_two_machines_call_the_same_run_complete_and_a_damaged_one_not(small_runs, caplog):
    assert small_runs("run") == 0

    def complete(group):
        return checkpoints_of(options_of("--run.name=run", "--optimizer.lr=5e-3"), group).complete_step()

    assert run_machines(2, complete) == [STEPS, STEPS]
    assert caplog.text.count("optimizer.lr 0.01 -> 0.005") == 1
    damaged = next(small_runs.checkpoint("run", STEPS).glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert run_machines(2, complete) == [None, None]

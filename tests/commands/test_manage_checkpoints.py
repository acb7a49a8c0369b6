"""The checkpoint command: what it lists, and what it finds damaged."""

import os
import re

import pytest
import torch

from tests.support.small_run import flip_last_bit
from torchround.checkpoint import Checkpointer
from torchround.checkpoint.folders import UNFINISHED, checkpoint_name
from torchround.checkpoint.manifest import read_manifest
from torchround.commands import manage_checkpoints
from torchround.commands.manage_checkpoints import main

TENSORS = "tensors-00000.safetensors"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "outputs" / "my-run"
    for step in range(1, 7):
        state = {"config": {"run": {"name": "my-run"}}}
        Checkpointer(folder / "checkpoints").save(step, {"w": torch.full((100,), float(step))}, state)
    (folder / "checkpoints" / checkpoint_name(7, UNFINISHED)).mkdir()
    (folder / "checkpoints" / "notes").mkdir()
    (folder / "config.toml").write_text(
        '[model]\nfamily = "llama3"\nflavor = "debug"\n[data]\nsources = [{ path = "x" }]\n'
        '[tokenizer]\nname = "bytes"\n[checkpoint]\nkeep_latest_k = 2\nkeep_every_n_steps = 3\n'
    )
    return folder


def left(run):
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_list_shows_what_is_there_and_what_is_damaged(run, capsys):
    assert main(["list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "folder",
        *(checkpoint_name(n) for n in range(1, 7)),
        checkpoint_name(7, UNFINISHED),
    ]
    assert all(line.endswith("complete") for line in lines[1:7])
    assert "unfinished" in lines[7]
    assert not any("0.00 GiB" in line for line in lines) and " MiB" in lines[1]
    (run / "checkpoints" / checkpoint_name(4) / "state.json").unlink()
    assert main(["list", str(run / "checkpoints")]) == 1
    assert "damaged: state.json is missing" in capsys.readouterr().out.splitlines()[4]


def test_verify_reads_every_byte_and_names_what_is_damaged(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert "all are sound" in capsys.readouterr().out
    flip_last_bit(run / "checkpoints" / checkpoint_name(5) / TENSORS)
    assert main(["verify", str(run)]) == 1
    output = capsys.readouterr()
    assert "1 are damaged" in output.out
    assert f"{checkpoint_name(5)}: {TENSORS} has checksum" in output.err
    assert main(["verify", str(run / "checkpoints" / checkpoint_name(5))]) == 1
    assert main(["verify", str(run / "checkpoints" / checkpoint_name(6))]) == 0


def test_a_checkpoint_that_a_run_deletes_while_it_is_verified_is_not_damaged(run, monkeypatch, capsys):
    def deleted_then_read(path):
        found = read_manifest(path)
        if path.name == checkpoint_name(2):
            folders = Checkpointer(run / "checkpoints")
            folders.delete([folders.named(step) for step in (2, 3)])
        return found

    monkeypatch.setattr(manage_checkpoints, "read_manifest", deleted_then_read)
    assert main(["verify", str(run)]) == 0
    output = capsys.readouterr()
    assert "all are sound" in output.out and not output.err
    assert main(["verify", str(run / "checkpoints" / checkpoint_name(2))]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["list", "nowhere"], "nowhere/checkpoints is not there"), (["verify", "empty"], "there are no checkpoints")],
)
def test_what_cannot_be_used_is_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_list_shows_links_to_another_disk_and_no_character_that_commands_a_terminal(run, tmp_path, capsys):
    checkpoints = run / "checkpoints"
    (checkpoints / checkpoint_name(5)).rename(tmp_path / "disk")
    (checkpoints / checkpoint_name(5)).symlink_to(tmp_path / "disk")
    (checkpoints / checkpoint_name(6)).rename(tmp_path / "gone")
    (checkpoints / checkpoint_name(6)).symlink_to(tmp_path / "\x1b[2J")
    os.utime(checkpoints / checkpoint_name(4), (2**31, 2**31))
    assert main(["list", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.search(rf"{checkpoint_name(4)} .* MiB +2038-01-\d\d \d\d:\d\d +complete", lines[4])
    assert re.search(rf"{checkpoint_name(5)} +0\.00 MiB .* complete", lines[5])
    assert "damaged: manifest.json cannot be read" in lines[6] and "\x1b" not in lines[6]

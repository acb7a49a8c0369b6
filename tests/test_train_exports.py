"""`checkpoint.export`: what a complete run leaves in Hugging Face format."""

import re
import shlex

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import train
from tests.support.released_run import exported, folder
from torchround.commands import export_hf

__all__ = ["folder"]


def test_a_complete_run_leaves_its_model_in_hugging_face_format(folder, capsys):
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 0
    released = load_file(folder / "release" / "model.safetensors")
    tensors = load_file(exported(folder) / "model.safetensors")
    assert tensors.keys() == released.keys()
    assert all(torch.equal(tensor, released[name]) for name, tensor in tensors.items())  # lr = 1e-30
    assert LlamaForCausalLM.from_pretrained(exported(folder)).config.num_hidden_layers == 2
    capsys.readouterr()
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 0
    assert "nothing to do" in capsys.readouterr().out  # nor is it written again


def test_a_complete_run_is_exported_by_the_command_that_it_ends_with_or_when_the_key_is_set_later(folder, capsys):
    assert train.main(["--config", "small.toml"]) == 0
    [command] = re.findall(r"torchround export_hf (.*)", capsys.readouterr().out)
    assert export_hf.main(shlex.split(command.replace("NEW_FOLDER", "new"))) == 0
    assert (folder / "new" / "config.json").is_file() and not exported(folder).exists()
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 0
    assert (exported(folder) / "config.json").is_file()


def test_an_export_that_cannot_be_written_says_that_the_checkpoint_is_intact(folder, capsys):
    assert train.main(["--config", "small.toml"]) == 0
    (exported(folder).parent).write_text("a file where a folder should be")
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 2
    assert "step-1 is whole, and torchround export_hf exports it" in capsys.readouterr().err
    assert train.main(["--config", "small.toml", "--checkpoint.export=adapters"]) == 2
    assert "legal: " in capsys.readouterr().err

"""`[model] hf_path`: a run starts from the weights in the folder, and every fault in it is one message at the start."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import train
from tests.support.released_run import ADAPTED, MAPPED, change_config, exported, folder, saved
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf
from torchround.commands import plan_run as plan_script

__all__ = ["folder"]


def changed(**changes):
    return lambda folder: change_config(folder, **changes)


def truncate(folder):
    path = folder / "release" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1.0}
# Further faults of the files are asked in tests/hf/test_pretrained.py.
FAULTS = {
    "no folder": (lambda folder: (folder / "release").rename(folder / "gone"), 'hf_path: given "release"'),
    "another family": (changed(model_type="qwen3_moe"), 'model_type "qwen3_moe"; legal: "qwen3"'),
    "a model that no family reads": (changed(model_type="mamba"), 'legal: "transformers"'),
    "a model without a type": (changed(model_type=None), "has model_type null"),
    "a truncated file": (truncate, "model.safetensors: truncated"),
    "another activation": (changed(hidden_act="gelu"), "hidden_act = 'gelu'"),
    "another kind of rope": (changed(rope_parameters=LONG_ROPE), "rope_type = 'longrope'"),
    "a tokenizer larger than the vocabulary": (changed(vocab_size=200), "tokenizer: it has 259 tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_folder_is_one_message_before_anything_is_made(fault, folder, capsys):
    spoil, expected = FAULTS[fault]
    spoil(folder)
    for dry in ((), ("--dry-run",)):
        assert train.main(["--config", "small.toml", *dry]) == 2
        printed = capsys.readouterr()
        assert expected in printed.err and printed.out == ""
        assert "Traceback" not in printed.err and not (folder / "outputs").exists()
        assert len(printed.err) < 1000, "a message of a screen is not read"


def test_a_plan_refuses_a_quantised_release_but_needs_no_weights(folder, capsys):
    plan = ["--config", "small.toml", "--device=rtx4090"]
    (folder / "release" / "model.safetensors").unlink()
    assert plan_script.main(plan) == 0
    change_config(folder, quantization_config={"quant_method": "gptq"})
    assert plan_script.main(plan) == 2
    assert "this is a quantised (gptq) release" in capsys.readouterr().err


def losses(folder, name):
    lines = (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_new_stage_of_a_mapped_run_has_its_adapters_and_the_base_of_the_files(folder):
    for name, table in (("copied", ADAPTED), ("mapped", MAPPED)):
        assert train.main(["--config", "small.toml", f"--run.name={name}", *table]) == 0
        stage = [f"--run.name={name}-2", "--optimizer.lr=1e-30", "--training.steps=1", "--checkpoint.load=weights"]
        load = f"--checkpoint.load_path=outputs/{name}/checkpoints/{checkpoint_name(3)}"
        assert train.main(["--config", "small.toml", *table, *stage, load]) == 0
    assert losses(folder, "mapped-2") == losses(folder, "copied-2")
    assert losses(folder, "mapped-2")[0] != losses(folder, "mapped")[0]  # of the adapters that were trained
    before, after = saved(folder, "mapped"), saved(folder, "mapped-2", step=1)
    adapters = [name for name in before if name.startswith("weights/")]
    assert len(adapters) == 16 and all(torch.equal(before[name], after[name]) for name in adapters)


@pytest.mark.parametrize("made_with, given", [(ADAPTED, MAPPED), (MAPPED, ADAPTED)], ids=["copied", "mapped"])
def test_a_checkpoint_with_its_base_is_not_mixed_with_one_in_files(made_with, given, folder, capsys):
    assert train.main(["--config", "small.toml", "--run.name=first", *made_with]) == 0
    goes_on = ["--run.name=first", "--training.steps=4"]
    load_path = f"--checkpoint.load_path=outputs/first/checkpoints/{checkpoint_name(3)}"
    new_stage = ["--run.name=second", "--checkpoint.load=weights", load_path]
    for arguments in (goes_on, new_stage):
        capsys.readouterr()
        assert train.main(["--config", "small.toml", *given, *arguments]) == 2
        printed = capsys.readouterr().err
        old, new = made_with is MAPPED, given is MAPPED
        assert f"(lora.map_base {old} -> {new})" in printed and "Traceback" not in printed


def test_a_run_resumed_with_another_base_folder_says_so(folder, capsys, caplog):
    assert train.main(["--config", "small.toml", *MAPPED]) == 0
    (folder / "release").rename(folder / "moved")
    moved = ("--model.hf_path=moved", "--training.steps=4")
    assert train.main(["--config", "small.toml", *MAPPED, *moved]) == 0
    assert "model.hf_path 'release' -> 'moved'" in caplog.text


def test_a_sequence_longer_than_the_models_positions_is_a_warning(folder, caplog):
    change_config(folder, max_position_embeddings=15)
    for flags in ((), ("--dry-run",)):
        caplog.clear()
        assert train.main(["--config", "small.toml", *flags]) == 0
        (said,) = [text for text in caplog.messages if "positions" in text]
        assert said.startswith("training.seq_len = 16, but the model knows only 15 positions")
    change_config(folder, max_position_embeddings=16)
    caplog.clear()
    assert train.main(["--config", "small.toml", "--dry-run"]) == 0
    assert not any("positions" in text for text in caplog.messages)


def test_a_complete_run_is_exported_by_the_command_or_when_the_key_is_set_later(folder, capsys):
    assert train.main(["--config", "small.toml"]) == 0
    [checkpoint] = (folder / "outputs" / "small" / "checkpoints").iterdir()
    assert export_hf.main([str(checkpoint), "new", "--config=outputs/small/config.toml"]) == 0
    assert (folder / "new" / "config.json").is_file() and not exported(folder).exists()
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 0
    released = load_file(folder / "release" / "model.safetensors")
    tensors = load_file(exported(folder) / "model.safetensors")
    assert tensors.keys() == released.keys()
    assert all(torch.equal(tensor, released[name]) for name, tensor in tensors.items())  # lr = 1e-30
    assert LlamaForCausalLM.from_pretrained(exported(folder)).config.num_hidden_layers == 2
    capsys.readouterr()
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 0
    assert "nothing to do" in capsys.readouterr().out  # nor is it written again


def test_an_export_that_cannot_be_written_says_that_the_checkpoint_is_intact(folder, capsys):
    assert train.main(["--config", "small.toml"]) == 0
    (exported(folder).parent).write_text("a file where a folder should be")
    assert train.main(["--config", "small.toml", "--checkpoint.export=weights"]) == 2
    assert f"{checkpoint_name(1)} is whole, and torchround export_hf exports it" in capsys.readouterr().err
    assert train.main(["--config", "small.toml", "--checkpoint.export=adapters"]) == 2
    assert "legal: " in capsys.readouterr().err

"""A small released model on disk, a config that trains it, and what its runs leave."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import train
from tests.support.small_run import tensors_in
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf
from torchround.config.load import RawConfig, validate

CONFIG = """
model = { family = "llama3", hf_path = "release" }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 1, seq_len = 16, global_batch_size = 2, dtype = "float32" }
engine = { devices = "cpu", cpu_threads = 1 }
optimizer = { lr = 1e-30, weight_decay = 0.0 }
"""


ADAPTED = ("--lora.rank=2", "--optimizer.lr=0.01", "--training.steps=3")
MAPPED = (*ADAPTED, "--lora.map_base=true")


def run(name, *overrides):
    return train.main(["--config", "small.toml", f"--run.name={name}", *overrides])


def exported_by_hand(name, folder, *options, step=3):
    checkpoint = folder / "outputs" / name / "checkpoints" / checkpoint_name(step)
    target = folder / f"{name} {step} {' '.join(options)}"
    own = ("--config", str(checkpoint.parents[1] / "config.toml"))
    assert export_hf.main([str(checkpoint), str(target), *own, *options]) == 0
    return target


def saved_config(**tables):
    sources = {"sources": [{"path": "text.jsonl"}]}
    training = {"seq_len": 16, "global_batch_size": 2} | tables.pop("training", {})
    tokenizer = {} if tables["model"].get("hf_path") else {"name": "bytes"}
    given = {"data": sources, "training": training, "tokenizer": tokenizer, **tables}
    return validate(RawConfig("a test", given)).model_dump(mode="json")


@pytest.fixture
def folder(working_folder):
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(working_folder / "release")
    (working_folder / "small.toml").write_text(CONFIG)
    write_lines(working_folder / "text.jsonl")
    return working_folder


def small_release(folder):
    """Write a release of three blocks whose matrices can be packed."""
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).bfloat16().save_pretrained(folder)


def write_lines(path, number=20):
    path.write_text("\n".join(json.dumps({"text": f"line {index} of some text"}) for index in range(number)))


def change_config(folder, **changes):
    path = folder / "release" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def saved(folder, name, step=3):
    return tensors_in(folder / "outputs" / name / "checkpoints" / checkpoint_name(step))


def exported(folder, step=1):
    return folder / "outputs" / "small" / "export" / checkpoint_name(step)

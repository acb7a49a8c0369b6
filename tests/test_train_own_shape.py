"""`[model.shape]`: a shape of one's own is checked, planned, trained, resumed, compared and exported.

An export has what the converter of llama.cpp reads (docs/trying.md): class, sizes, names of tensors and a tokenizer.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

import train
from tests.support.released_run import write_lines
from tests.support.toy_release import load_model
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf
from torchround.commands import plan_run as plan_script
from torchround.commands.configured_model import model_config
from torchround.config import parse_command_line

CONFIG = """
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 2, seq_len = 16, global_batch_size = 2, dtype = "float32" }
engine = { devices = "cpu", cpu_threads = 1, measure_steps = 0 }
[model]
"""
SIZES = "num_layers = 2, hidden_size = 24, num_heads = 4, num_kv_heads = 2, head_dim = 10, ffn_size = 40"
EXPERTS = "num_experts = 3, num_chosen = 2"
SHAPES = {
    "llama3": SIZES,
    "qwen3": SIZES + ", tied_embeddings = true, rope_theta = 5e3, norm_eps = 1e-4, max_positions = 64",
    "qwen3 with experts": f"{SIZES}, {EXPERTS}, vocab_size = 384",
    "gpt_oss": f"{SIZES}, {EXPERTS}, window = 5, balance_coefficient = 0.0",
}

CLASSES = {
    "llama3": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3 with experts": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

# Names in Hugging Face's files, where they are others.
NAMES = {
    "num_layers": ["num_hidden_layers"],
    "num_heads": ["num_attention_heads"],
    "num_kv_heads": ["num_key_value_heads"],
    "ffn_size": ["moe_intermediate_size", "intermediate_size"],
    "max_positions": ["max_position_embeddings"],
    "norm_eps": ["rms_norm_eps"],
    "tied_embeddings": ["tie_word_embeddings"],
    "num_experts": ["num_experts", "num_local_experts"],
    "num_chosen": ["num_experts_per_tok"],
    "window": ["sliding_window"],
}


@pytest.fixture
def folder(working_folder):
    write_lines(working_folder / "text.jsonl")
    return working_folder


def write(folder, family, shape, more=""):
    (folder / "own.toml").write_text(f'{CONFIG}family = "{family}"\n{more}\nshape = {{{shape}}}\n')
    return ["--config", "own.toml"]


@pytest.mark.parametrize("kind", [*SHAPES])
def test_a_shape_is_planned_trained_resumed_and_exported_as_it_was_given(kind, folder, capsys):
    arguments = write(folder, kind.split()[0], SHAPES[kind])
    assert plan_script.main([*arguments, "--device=rtx4090"]) == 0
    assert train.main([*arguments, "--dry-run"]) == 0
    assert train.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"model    {kind.split()[0]} of its own shape: " in printed and " in 4 layers" in printed
    assert train.main([*arguments, "--training.steps=3"]) == 0
    assert export_hf.main([f"outputs/own/checkpoints/{checkpoint_name(3)}", "exported"]) == 0
    content = AutoConfig.from_pretrained("exported").to_dict()
    content["rope_theta"] = content["rope_parameters"]["rope_theta"]
    content["balance_coefficient"] = None if content.get("output_router_logits") else 0.0
    given = {key: json.loads(value) for key, value in (part.split(" = ") for part in SHAPES[kind].split(", "))}
    for key, value in given.items():
        assert value in [content[name] for name in NAMES.get(key, (key,)) if name in content], key
    assert content["vocab_size"] == given.get("vocab_size", 259) and content["architectures"] == [CLASSES[kind]]
    assert {"rms_norm_eps", "max_position_embeddings", "head_dim"} <= content.keys()
    assert max(AutoTokenizer.from_pretrained("exported").get_vocab().values()) < content["vocab_size"]
    model = load_model(Path("exported"))  # with every tensor of the class, and no other
    assert model(torch.arange(9)[None]).logits.shape == (1, 9, content["vocab_size"])


def test_a_shape_beside_a_flavor_replaces_only_what_it_names(folder, capsys):
    arguments = write(folder, "qwen3", "num_layers = 3, num_experts = 4", more='flavor = "debug_moe"')
    assert train.main([*arguments, "--training.steps=1"]) == 0
    assert "model    qwen3 debug_moe with other sizes: " in capsys.readouterr().out
    assert export_hf.main([f"outputs/own/checkpoints/{checkpoint_name(1)}", "exported"]) == 0
    content = json.loads(Path("exported/config.json").read_text())
    kept = {"hidden_size": 128, "moe_intermediate_size": 56, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
    changed = {"num_hidden_layers": 3, "num_experts": 4}
    assert kept.items() | changed.items() <= {(k, v) for k, v in content.items() if isinstance(v, (int, float))}


def test_a_run_is_not_resumed_with_another_shape_even_if_its_tensors_are_alike(folder, capsys):
    assert train.main(write(folder, "llama3", f"{SIZES}, rope_theta = 500.0")) == 0
    more = "--training.steps=3"
    assert train.main([*write(folder, "llama3", f"{SIZES}, rope_theta = 600.0"), more]) == 2
    message = capsys.readouterr().err
    assert "of another model" in message and "500.0" in message and "600.0" in message


MISTAKES = {
    "a size too few": ("llama3", "num_layers = 2, hidden_size = 24", "missing: num_heads, ffn_size"),
    "no head": ("qwen3", "num_layers = 2, hidden_size = 25, num_heads = 4, ffn_size = 8", "head_dim is missing"),
    "experts in a family without": ("llama3", f"{SIZES}, {EXPERTS}", "no num_experts, num_chosen"),
    "no experts in a family that has them": ("gpt_oss", SIZES, "missing: num_experts, num_chosen"),
    "too many experts chosen": ("qwen3", f"{SIZES}, num_experts = 2, num_chosen = 3", "num_chosen = 3, must be 1 to"),
    "a vocabulary too small": ("llama3", f"{SIZES}, vocab_size = 200", "tokenizer has 259 tokens"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_shape_is_one_message_and_nothing_is_written(name, folder, capsys):
    family, shape, expected = MISTAKES[name]
    assert train.main(write(folder, family, shape)) == 2
    assert expected in capsys.readouterr().err
    assert not (folder / "outputs").exists()


def test_a_shape_is_planned_without_its_tokenizer_if_it_says_its_vocabulary(folder, capsys):
    plan = ["--device=rtx4090", "--tokenizer.name=none", "--tokenizer.path=nowhere"]
    assert plan_script.main([*write(folder, "llama3", SIZES), *plan]) == 2
    assert "missing: vocab_size (there is no tokenizer to take it from)" in capsys.readouterr().err
    assert plan_script.main([*write(folder, "llama3", f"{SIZES}, vocab_size = 300"), *plan]) == 0


def test_a_shape_beside_a_named_flavor_keeps_its_vocabulary(folder):
    """A tokenizer of few tokens does not change the size of the model, and a plan without the tokenizer counts the same."""
    arguments = write(folder, "llama3", "num_layers = 1", more='flavor = "3.2-1B"')
    assert model_config(parse_command_line(arguments), 259)[1].vocab_size == 128256
    assert model_config(parse_command_line(arguments), 130000)[1].vocab_size == 130000
    arguments = write(folder, "llama3", "num_layers = 1, vocab_size = 512", more='flavor = "3.2-1B"')
    assert model_config(parse_command_line(arguments), 259)[1].vocab_size == 512

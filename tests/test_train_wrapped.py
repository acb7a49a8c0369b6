"""Runs of `train.py` on the text model of a release that reads more than text, from the release to an export of all of it."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.support import model_tools
from tests.support.released_run import exported_by_hand, run, saved, write_lines
from tests.support.small_run import tensors_in
from tests.support.toy_decoders import toy_config, toy_decoder
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands.configured_model import open_saved_model
from torchround.config import parse_command_line

CONFIG = """
model = { family = "transformers", hf_path = "release" }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 2, seq_len = 16, global_batch_size = 2, dtype = "float32" }
optimizer = { lr = 1e-2 }
checkpoint = { interval_steps = 1 }
engine = { devices = "cpu", cpu_threads = 1 }
"""
# By `model_type`: a part that is carried.
KINDS = {
    "qwen3_5": "model.visual",
    "qwen3_5_moe": "model.visual",
    "gemma3": "vision_tower",
    "gemma4": "model.vision_tower",
    "mistral3": "vision_tower",
    "llama4": "vision_model",
}
VOCAB = 264
# The others run by night, but for the one with linear attention and heads for several tokens.
MARKS = {"mistral3": [], "qwen3_5": [pytest.mark.releases]}
ADAPTED = ("--lora.rank=2", "--lora.targets=['q_proj', 'o_proj']", "--optimizer.lr=0.05")
SINGLE = "model.safetensors"
TOKENS = torch.arange(2, 14)[None]
pytestmark = pytest.mark.thorough


@pytest.fixture(params=[pytest.param(kind, marks=MARKS.get(kind, pytest.mark.nightly)) for kind in KINDS])
def kind(request):
    return request.param


@pytest.fixture
def folder(working_folder, kind):
    (working_folder / "small.toml").write_text(CONFIG)
    write_lines(working_folder / "text.jsonl", 30)
    config = toy_config(kind)
    config.get_text_config().vocab_size = VOCAB
    toy_decoder(config, seed=1).save_pretrained(working_folder / "release")
    (working_folder / "release" / "preprocessor_config.json").write_text('{"of": "pictures"}')
    # Heads for several tokens, which transformers leaves out.
    if kind.startswith("qwen3_5"):
        path = working_folder / "release" / SINGLE
        save_file(load_file(path) | {"mtp.fc.weight": torch.randn(3, 5).half()}, path, metadata={"format": "pt"})
    return working_folder


def logits_of_layers(name, batch):
    """Return the logits of the trained layers, from the checkpoint alone."""
    checkpoint = Path("outputs") / name / "checkpoints" / checkpoint_name(2)
    opened = open_saved_model(parse_command_line(["--config", "small.toml"]), checkpoint)
    model = model_tools.materialise(opened.model)
    views = model_tools.stored_parameters(model).items()
    opened.weights.load({name: nullcontext(parameter.data) for name, parameter in views})
    with torch.no_grad():
        return model_tools.all_logits(model, batch)


def test_a_resumed_run_trains_the_text_and_its_export_is_the_whole_release_by_either_names(kind, folder, capsys):
    assert run("whole", "--dry-run") == 0
    part = KINDS[kind]
    printed = capsys.readouterr().out
    assert f"not trained: {part}: " in printed.replace("; ", "\nnot trained: ")
    assert run("whole") == run("parts") == 0
    shutil.rmtree(folder / "outputs" / "parts" / "checkpoints" / checkpoint_name(2))
    assert run("parts") == 0
    whole, parts = saved(folder, "whole", 2), saved(folder, "parts", 2)
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    target = exported_by_hand("whole", folder, step=2)
    theirs, base = tensors_in(target), tensors_in(folder / "release")
    assert theirs.keys() == base.keys()
    same = {name for name in base if torch.equal(theirs[name], base[name])}
    assert all(theirs[name].dtype == base[name].dtype for name in base)
    moved = base.keys() - same
    assert not any(name.startswith((part, "mtp")) for name in moved)
    assert any("embed" in name for name in moved) and any("layers.3" in name for name in moved)
    assert (target / "preprocessor_config.json").read_text() == '{"of": "pictures"}'
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder / "release", target))
    assert all(after[key] == before[key] for key in ("architectures", "text_config", "vision_config"))
    loaded = AutoModelForImageTextToText.from_pretrained(target).eval()
    batch = model_tools.micro_batch([[12]], VOCAB)
    with torch.no_grad():
        expected = loaded(batch.tokens).logits
    assert (logits_of_layers("whole", batch) - expected).abs().max() < 1e-5 * expected.abs().max()
    others = {name for name in loaded.state_dict() if "vision" in name or "visual" in name or "projector" in name}
    released = AutoModelForImageTextToText.from_pretrained(folder / "release")
    assert others and all(torch.equal(loaded.state_dict()[name], released.state_dict()[name]) for name in others)
    check_names_of_modules(released, folder, whole)


def check_names_of_modules(released, folder, trained):
    """Train a folder whose tensors have the names of the modules, which are read as those of the release."""
    (folder / "new").mkdir()
    shutil.copy(folder / "release" / "config.json", folder / "new")
    tied = released.all_tied_weights_keys
    tensors = {name: tensor.clone() for name, tensor in released.state_dict().items() if name not in tied}
    save_file(tensors, folder / "new" / SINGLE, metadata={"format": "pt"})
    assert run("new", "--model.hf_path=new") == 0
    new = saved(folder, "new", 2)
    assert trained.keys() == new.keys() and all(torch.equal(trained[key], new[key]) for key in trained)


def test_adapters_are_found_in_the_whole_model_and_in_its_text_alone(kind, folder):
    from peft import PeftModel

    assert run("adapted", *ADAPTED) == 0
    merged, adapters = (exported_by_hand("adapted", folder, *more, step=2) for more in ((), ("--adapters",)))
    base = AutoModelForImageTextToText.from_pretrained(folder / "release")
    before = base(TOKENS).logits
    adapted = PeftModel.from_pretrained(base, adapters).eval()
    expected = adapted(TOKENS).logits
    assert (expected - before).abs().max() > 0.05  # training moved them
    found = AutoModelForImageTextToText.from_pretrained(merged)(TOKENS).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()  # fp32, merged once
    names = {name.replace(".default.", ".") for name, _ in adapted.named_parameters() if "lora_" in name}
    assert names == load_file(adapters / "adapter_model.safetensors").keys()

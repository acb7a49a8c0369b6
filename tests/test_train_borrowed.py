"""Runs of `train.py` with `model.family = "transformers"`: from a released folder to an export, through the real command."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.borrowed_toys import write_toy
from tests.support.released_run import exported_by_hand, run, saved, write_lines
from tests.support.small_run import fp32_weights
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import configured_model, plan_run
from torchround.config import parse_command_line
from torchround.layer import may_compile

CONFIG = """
model = { family = "transformers", hf_path = "release" }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 3, seq_len = 16, global_batch_size = 3, dtype = "float32" }
optimizer = { lr = 1e-2 }
checkpoint = { interval_steps = 2 }
[engine]
devices = "cpu"
num_devices = 2
cpu_threads = 1
device_memory_gib = 0.001 # so that a plan asks for short sequences alone
plan = { forward = [2], fused = 2, backward = [2], rounds = 1 }
"""
KINDS = ["qwen2", "gemma2", "qwen3_moe"]
BFLOAT16, MUON, COMPACT = "--training.dtype=bfloat16", "--optimizer.name=muon", "--optimizer.state=compact"
# Optimizers and forms of state, each with a kind of model.
STATES = {
    "compact": ("gemma2", COMPACT),
    "compact, predicted": ("qwen2", COMPACT, BFLOAT16, "--engine.update=async"),
    "muon, experts": ("qwen3_moe", MUON),
    "muon, split": ("qwen2", MUON, BFLOAT16),
    "muon, compact": ("gemma2", MUON, COMPACT, BFLOAT16, "--engine.update=async"),
    "adapters, experts": ("qwen3_moe", "--lora.rank=2", "--lora.targets=['q_proj', 'gate_up_proj', 'down_proj']"),
    "muon, adapters": ("qwen2", MUON, BFLOAT16, "--lora.rank=2", "--lora.targets=['q_proj', 'down_proj']"),
}
RUNS = {**{kind: (kind,) for kind in KINDS}, **STATES}
# Adapters of experts are resumed in the test below.
MARKS = {"muon, compact": [], "qwen3_moe": [pytest.mark.releases]}
ADAPTED = ("--lora.rank=2", "--lora.targets=['q_proj', 'down_proj']", "--optimizer.lr=0.05")
SCALED = ("--lora.dora=true", "--lora.rslora=true", "--lora.rank_pattern={ q_proj = 3 }")
SINGLE = "model.safetensors"
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("release")
            write_toy(kind, made[kind], vocab_size=264)
        return made[kind]

    return get


@pytest.fixture
def folder(working_folder, releases):
    """Enter a folder with a config, a text and a release: a link, so that it is written once for all tests."""
    (working_folder / "small.toml").write_text(CONFIG)
    write_lines(working_folder / "text.jsonl", 30)
    (working_folder / "release").symlink_to(releases("qwen2"))
    return working_folder


def take(folder, release):
    (folder / "release").unlink()
    (folder / "release").symlink_to(release)


def change_config(folder, **changes):
    release = (folder / "release").resolve()
    (folder / "release").unlink()
    (folder / "release").mkdir()
    (folder / "release" / SINGLE).symlink_to(release / SINGLE)
    content = json.loads((release / "config.json").read_text()) | changes
    (folder / "release" / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, pytest.mark.nightly)) for case in RUNS])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one_and_its_export_is_what_transformers_loads(
    case, folder, releases
):
    kind, *settings = RUNS[case]
    take(folder, releases(kind))
    assert run("whole", *settings) == run("parts", *settings, "--engine.num_devices=1", "--engine.plan=none") == 0
    shutil.rmtree(folder / "outputs" / "parts" / "checkpoints" / checkpoint_name(3))
    assert run("parts", "--engine.num_devices=3", *settings) == 0
    whole, parts = saved(folder, "whole"), saved(folder, "parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)
    parts_of_state = {key.split("/")[0] for key in whole}
    assert ("momentum_buffer" in parts_of_state) == (MUON in settings)
    assert any(part.endswith("_scale") for part in parts_of_state) == (COMPACT in settings)
    if "adapters" in case:
        return
    target = exported_by_hand("whole", folder)
    theirs, base = load_file(target / SINGLE), load_file(folder / "release" / SINGLE)
    assert theirs.keys() == base.keys() and not any(torch.equal(theirs[name], base[name]) for name in base)
    numbers = torch.cat([tensor.flatten() for tensor in fp32_weights(whole).values()])
    model = AutoModelForCausalLM.from_pretrained(target)
    loaded = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert torch.equal(loaded.sort().values, numbers.sort().values)
    content = json.loads((target / "config.json").read_text())
    assert content["model_type"] == kind and content["eos_token_id"] == 257  # of the tokenizer
    assert (target / "generation_config.json").is_file() and (target / "tokenizer.json").is_file()
    idle = ("--training.steps=1", "--optimizer.lr=1e-30", "--optimizer.weight_decay=0.0", "--checkpoint.export=weights")
    assert run("again", *settings, f"--model.hf_path={target}", *idle) == 0
    after = load_file(folder / "outputs" / "again" / "export" / checkpoint_name(1) / SINGLE)
    assert all(torch.equal(after[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *(pytest.param(kind, (), marks=pytest.mark.nightly) for kind in KINDS[:2]),
        pytest.param(KINDS[0], SCALED, marks=pytest.mark.releases),
        (KINDS[2], ()),
    ],
)
def test_adapters_are_exported_merged_or_alone_loaded_by_another_run_and_trained_alike_on_a_mapped_base(
    kind, more, folder, releases, capsys
):
    from peft import PeftModel

    take(folder, releases(kind))
    adapted = (*ADAPTED, *more)
    assert run("read", *adapted) == 0
    merged, adapters = exported_by_hand("read", folder), exported_by_hand("read", folder, "--adapters")
    base = AutoModelForCausalLM.from_pretrained(folder / "release")
    tokens = torch.arange(12)[None]
    before = base(tokens).logits
    expected = PeftModel.from_pretrained(base, adapters).eval()(tokens).logits
    assert (expected - before).abs().max() > 0.05  # training moved them
    found = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()  # fp32, merged once
    read = saved(folder, "read")
    idle = ("--optimizer.lr=1e-30", "--optimizer.weight_decay=0.0", f"--lora.path={adapters}", "--training.steps=1")
    assert run("other", *adapted, *idle) == 0
    other = saved(folder, "other", step=1)
    weights = [key for key in read if key.startswith("weights/") and "lora_" in key]
    for key in weights:  # of a magnitude the sum with its row's norm was rounded once
        assert torch.allclose(read[key], other[key], rtol=0, atol=1e-6 if "magnitude" in key else 0), key
    assert any("magnitude" in key for key in weights) == (more == SCALED)
    part = "experts.lora_A" if kind == "qwen3_moe" else "down_proj"
    for change, message in (
        ("--lora.rank=3", "r is 2 instead of 3"),
        ("--lora.alpha=8.0", "lora_alpha is 16.0 instead of 8.0"),
        ('--lora.targets=["q_proj"]', f"not part of the model: base_model.model.model.layers.0.mlp.{part}"),
        ("--lora.path=nowhere", "adapter_config.json cannot be read"),
    ):
        capsys.readouterr()
        assert run("refused", *adapted, *idle, change) == 2
        assert message in capsys.readouterr().err
    assert run("mapped", *adapted, "--lora.map_base=true") == 0
    shutil.rmtree(folder / "outputs" / "mapped" / "checkpoints" / checkpoint_name(3))
    assert run("mapped", *adapted, "--lora.map_base=true", "--engine.num_devices=3") == 0  # resumed after step 2
    mapped = saved(folder, "mapped")
    assert mapped.keys() < read.keys()
    assert all(torch.equal(mapped[key], read[key]) for key in mapped)
    first, second = (load_file(target / SINGLE) for target in (merged, exported_by_hand("mapped", folder)))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_dry_run_and_a_plan_count_the_model_and_make_nothing(folder, capsys):
    assert run("small", "--dry-run") == 0
    assert "a checkpoint takes" in capsys.readouterr().out
    assert plan_run.main(["--config", "small.toml", "--device=rtx4090", "--engine.device_memory_gib=0.001"]) == 0
    assert "each device needs" in capsys.readouterr().out
    assert not (folder / "outputs").exists()


NO_FOLDER = "--model.hf_path=none"
MISTAKES = {
    "a flavor": ((NO_FOLDER, "--model.flavor=7B"), {}, 'model.flavor: given "7B"'),
    "a shape": ((NO_FOLDER, "--model.shape={ num_layers = 2 }"), {}, "model.shape: given a table"),
    "no model": ((NO_FOLDER,), {}, "legal: one of them"),
    "a type that transformers does not know": ((), {"model_type": "qwen99"}, "'qwen99' is unknown"),
    "no type": ((), {"model_type": None}, "config.json: model_type = None"),
    "a quantised release": ((), {"quantization_config": {"quant_method": "awq"}}, "a quantised (awq) release"),
    "dropout": ((), {"attention_dropout": 0.1}, "model_type 'qwen2' of transformers does not fit"),
    "an encoder": ((), {"model_type": "t5"}, "release/config.json: "),
    "a tokenizer that is larger": ((), {"vocab_size": 200}, "tokenizer: it has 259 tokens"),
    "no such target": (("--lora.rank=2", "--lora.targets=['query']"), {}, "lora.targets: this model has no 'query'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_made(mistake, folder, capsys):
    overrides, changes, expected = MISTAKES[mistake]
    if changes:
        change_config(folder, **changes)
    for dry in ((), ("--dry-run",)):
        assert run("small", *dry, *overrides) == 2
        printed = capsys.readouterr()
        assert expected in printed.err and printed.out == ""
        assert "Traceback" not in printed.err and not (folder / "outputs").exists()
        assert len(printed.err) < 1000, "a message of a screen is not read"


def test_a_missing_package_is_one_message_that_says_what_to_install(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("small") == 2
    assert "pip install 'transformers" in capsys.readouterr().err


def test_only_blocks_of_recognised_parts_may_be_compiled(folder, releases):
    model = configured_model.build_model(parse_command_line(["--config", "small.toml", "--engine.compile=true"]))
    assert [*map(may_compile, model.layers)] == [False, True, True, False]
    take(folder, releases("gemma2"))
    model = configured_model.build_model(parse_command_line(["--config", "small.toml"]))
    assert not any(map(may_compile, model.layers))

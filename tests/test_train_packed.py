"""`[lora] base`: runs on packed frozen weights, by their commands, against runs on the numbers that the packed ones stand for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.released_run import run, saved, write_lines
from tests.support.releases import releases
from tests.support.small_run import flip_last_bit, working_folder
from tests.support.toy_release import write_release
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf, plan_run, try_model
from torchround.packed_formats import FORMATS

__all__ = ["working_folder"]

CONFIG = """
model = { hf_path = "release" }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 3, seq_len = 16, global_batch_size = 2, dtype = "bfloat16" }
engine = { devices = "cpu", num_devices = 2, cpu_threads = 1 }
optimizer = { lr = 1e-2 }
lr_schedule = { decay = "none" }
lora = { rank = 2, targets = ["q_proj", "o_proj"] }
"""
WEIGHTS = "model.safetensors"


def is_packed(name, tensor):
    return ".layers." in name and tensor.ndim > 1 and "router" not in name and "bias" not in name


@pytest.fixture
def folder(working_folder):
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).bfloat16()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05)
    model.save_pretrained(working_folder / "release")
    (working_folder / "small.toml").write_text(CONFIG)
    write_lines(working_folder / "text.jsonl")
    return working_folder


def losses(folder, name):
    lines = (folder / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def assert_trained_alike(folder, name, reference):
    assert losses(folder, name) == losses(folder, reference)
    ours, theirs = saved(folder, name), saved(folder, reference)
    assert [key for key in theirs if "lora" in key]
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs if "lora" in key)


def rounded_release(folder, packed):
    """Write the release with the numbers that its packed form stands for."""
    tensors = load_file(folder / "release" / WEIGHTS)
    for name, tensor in tensors.items():
        if is_packed(name, tensor):
            memory = torch.empty(packed.nbytes(tensor.numel()), dtype=torch.uint8)
            packed.pack(tensor.reshape(-1), memory)
            packed.unpack(memory, tensor.view(-1))
    (folder / "rounded").mkdir()
    (folder / "rounded" / "config.json").write_bytes((folder / "release" / "config.json").read_bytes())
    save_file(tensors, folder / "rounded" / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("base", FORMATS)
def test_a_run_has_the_bits_of_one_on_the_numbers_of_the_packed_weights(base, folder):
    rounded_release(folder, FORMATS[base])
    assert run("plain", "--model.hf_path=rounded") == 0
    assert run("packed", f"--lora.base={base}") == 0
    assert_trained_alike(folder, "packed", "plain")
    assert run("unpacked") == 0
    assert losses(folder, "unpacked") != losses(folder, "plain")
    # Its checkpoints leave the packed weights to the release.
    assert not [name for name in saved(folder, "packed") if "q_proj" in name or "query.weight" in name]


def test_a_run_resumes_from_a_cache_and_maps_it_with_the_same_bits(folder, caplog):
    packed = ("--lora.base=nf4",)
    cached = (*packed, "--lora.base_cache=cache")
    assert run("whole", *packed) == 0
    assert run("parts", *packed, "--training.steps=1") == run("parts", *packed) == 0
    assert run("writes", *cached, "--training.steps=2") == 0
    (cache,) = (folder / "cache").iterdir()
    written = [path.stat().st_mtime_ns for path in sorted(cache.rglob("*"))]
    assert run("writes", *cached) == run("reads", *cached) == 0
    assert run("maps", *cached, "--lora.map_base=true") == 0
    assert run("maps-first", "--lora.base=nf4", "--lora.base_cache=other", "--lora.map_base=true") == 0
    assert [path.stat().st_mtime_ns for path in sorted(cache.rglob("*"))] == written
    for name in ("parts", "writes", "reads", "maps", "maps-first"):
        assert_trained_alike(folder, name, "whole")
    # Another base has a cache of its own, and adapters that are put on it are named.
    rounded_release(folder, FORMATS["fp8"])
    weights = folder / "outputs" / "whole" / "checkpoints" / checkpoint_name(3)
    begun = (*cached, "--checkpoint.load=weights", f"--checkpoint.load_path={weights}")
    assert run("same", *begun) == 0
    assert "another base" not in caplog.text
    assert run("another", *begun, "--model.hf_path=rounded") == 0
    assert "another base (model.hf_path 'release' -> 'rounded')" in caplog.text
    assert len(list((folder / "cache").iterdir())) == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {"truncated": truncate, "a changed bit": flip_last_bit, "gone": lambda path: path.unlink()}


def test_nothing_is_trained_on_a_damaged_cache(folder, capsys):
    cached = ("--lora.base=nf4", "--lora.base_cache=cache")
    assert run("writes", *cached, "--training.steps=1") == 0
    (path,) = (folder / "cache").rglob("*.safetensors")
    whole = path.read_bytes()
    for damage in DAMAGE.values():
        for maps in ("false", "true"):
            path.write_bytes(whole)
            damage(path)
            capsys.readouterr()
            assert run("reads", *cached, f"--lora.map_base={maps}") == 2
            printed = capsys.readouterr().err
            assert "lora.base_cache: " in printed and path.name in printed and "Traceback" not in printed
            assert not (folder / "outputs" / "reads" / "metrics.jsonl").exists()


def test_a_weight_that_is_not_finite_is_named(folder, capsys):
    tensors = load_file(folder / "release" / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, folder / "release" / WEIGHTS, metadata={"format": "pt"})
    assert run("fails", "--lora.base=fp8") != 0
    printed = capsys.readouterr().err
    assert "Traceback" not in printed and "model.layers.1.mlp.up_proj.weight cannot be packed" in printed


MISTAKES = {
    "no adapters": ("--lora.rank=0", "--lora.base=nf4"),
    "a cache of nothing": ("--lora.base_cache=cache",),
    "a map of nothing": ("--lora.base=nf4", "--lora.map_base=true"),
    "no release to keep the format of": (
        "--model.hf_path=none",
        "--model.family=llama3",
        "--model.flavor=debug",
        "--lora.base=auto",
    ),
    "DoRA": ("--lora.base=nf4", "--lora.dora=true"),
    "experts of a dense model": ("--lora.base=nf4", "--lora.experts_by_need=true", "--engine.compile=false"),
    "an unknown format": ("--lora.base=int4",),
    "random weights": ("--model.hf_path=none", "--model.family=llama3", "--model.flavor=debug", "--lora.base=nf4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake, folder, capsys):
    assert run("mistake", *MISTAKES[mistake]) == 2
    printed = capsys.readouterr().err
    assert "lora.base" in printed and "Traceback" not in printed


def test_a_trained_run_is_tried_and_exported_on_the_weights_that_it_trained_with(folder, capsys):
    assert run("packed", "--lora.base=nf4", "--checkpoint.export=weights") == 0
    assert run("adapters", "--lora.base=nf4", "--checkpoint.export=adapters") == 0
    capsys.readouterr()

    def nats(*arguments):
        assert try_model.main([*arguments, "--perplexity", "text.jsonl", "--training.seq_len=24"]) == 0
        return float(capsys.readouterr().out.split("nats per token")[0].split()[-1])

    tried = nats("--run", "outputs/packed")
    adapters = ("--lora.rank=2", '--lora.targets=["q_proj", "o_proj"]', "--lora.base=nf4")
    alone = f"--lora.path=outputs/adapters/export/{checkpoint_name(3)}"
    assert tried == nats("--model", "release", "--tokenizer.name=bytes", alone, *adapters)
    assert tried == pytest.approx(nats("--model", f"outputs/packed/export/{checkpoint_name(3)}"), abs=0.02)
    export = folder / "outputs/packed/export" / checkpoint_name(3)
    assert "base in `nf4`" in (export / "README.md").read_text()
    checkpoint = f"outputs/packed/checkpoints/{checkpoint_name(3)}"
    assert export_hf.main([checkpoint, "original", "--config", "small.toml", "--original-base"]) == 0
    rounded_release(folder, FORMATS["nf4"])
    frozen = "model.layers.0.mlp.up_proj.weight"
    for exported, numbers in ((export, "rounded"), (folder / "original", "release")):
        assert torch.equal(load_file(exported / WEIGHTS)[frozen], load_file(folder / numbers / WEIGHTS)[frozen])


def test_experts_in_mxfp4_stay_so_with_the_bits_of_a_run_that_unpacks_them(folder):
    [gpt_oss] = [release for release in releases() if release.name == "openai/gpt-oss-20b"]
    write_release(folder / "gpt-oss", gpt_oss.config, gpt_oss.tokenizer)
    blocks = [name for name in load_file(folder / "gpt-oss" / WEIGHTS) if name.endswith("_blocks")]
    config = "--model.hf_path=gpt-oss"
    assert len(blocks) == 4 and run("plain", config) == run("kept", config, "--lora.base=auto") == 0
    assert run("mxfp4", config, "--lora.base=mxfp4") == 0
    assert_trained_alike(folder, "kept", "plain")
    assert losses(folder, "mxfp4") != losses(folder, "plain")  # attention is packed too
    assert plan_run.main(["--config", "small.toml", "--device=rtx4090", config, "--lora.base=auto"]) == 0


# By what a scale is for: the ending of its name, its rows and columns, and the table of the config.
COMPRESSED = {"format": "float-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
COMPRESSED["config_groups"]["group_0"]["weights"] |= {"symmetric": True, "strategy": "channel"}
SCALES = {
    "blocks": ("_scale_inv", (128, 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "rows": ("_scale", (1, None), {"quant_method": "compressed-tensors", **COMPRESSED}),
    "tensors": ("_scale_inv", (None, None), {"quant_method": "fp8", "weight_block_size": None}),
}


@pytest.mark.parametrize("of", SCALES)
def test_an_fp8_release_stays_so_byte_by_byte_with_the_bits_of_a_run_in_bf16(of, folder):
    ending, block, table = SCALES[of]
    tensors, codes = load_file(folder / "release" / WEIGHTS), {}
    for name in [name for name, tensor in tensors.items() if is_packed(name, tensor)]:
        rows, columns = tensors[name].shape
        scales = torch.rand(rows // (block[0] or rows), columns // (block[1] or columns)) / 2000 + 1e-4
        tensors[name + ending] = scales.view(()) if of == "tensors" else scales
        tensors[name] = codes[name] = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "release" / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "release" / "config.json").read_text())
    (folder / "release" / "config.json").write_text(json.dumps(config | {"quantization_config": table}))
    assert run("plain") == run("kept", "--lora.base=auto", "--lora.base_cache=cache") == 0
    assert_trained_alike(folder, "kept", "plain")
    written = b"".join(path.read_bytes() for path in (folder / "cache").rglob("*.safetensors"))
    assert len(codes) == 14 and all(bytes(c.view(torch.uint8).flatten().tolist()) in written for c in codes.values())

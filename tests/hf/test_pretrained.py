"""Hugging Face folders into the host store: every number in its place, and every fault named before reading."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.small_run import tensors_in
from torchround.engine.store.host_store import HostStore
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.packed import dequantise
from torchround.untrusted import terminal

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read(release, folder=None):
    model, names = release.family.build(release.config), release.family.hf_names(release.config)
    redundant = release.family.names_in_folder(release.config, ()).redundant
    return PretrainedWeights(folder or release.folder, names, model.stored_shapes(), redundant)


def initialised(release, pretrained=None):
    model = release.family.build(release.config)
    store = HostStore(model, torch.bfloat16)
    store.initialize(model, 0, (pretrained or read(release)).load)
    return store


@pytest.fixture
def rewritten(hf, tmp_path):
    def write(kind, change):
        release = hf.release(kind, tmp_path)
        tensors = load_file(tmp_path / SINGLE)
        change(tensors)
        save_file(tensors, tmp_path / SINGLE)
        return release

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_file_of_another_type_is_read_too(dtype, hf, tmp_path):
    release = hf.release("llama3", tmp_path, dtype)
    expected = load_file(tmp_path / SINGLE)["model.norm.weight"].float()
    assert torch.equal(initialised(release).weights()["head.norm.weight"], expected)


def test_mxfp4_experts_become_what_transformers_makes_of_them(rewritten):
    expected, generator = {}, torch.Generator().manual_seed(0)

    def quantise(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
            scales = torch.randint(110, 130, (experts, outputs, inputs // 32), generator=generator)
            quantised = blocks.to(torch.uint8), scales.to(torch.uint8)
            tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), quantised, strict=True))
            expected[name] = convert_moe_packed_tensors(*quantised, dtype=torch.float32)

    release = rewritten("gpt_oss", quantise)
    weights, names = initialised(release).weights(), release.family.hf_names(release.config)
    assert len(expected) == 4
    for ours, theirs in names.items():
        if theirs in expected:
            assert torch.equal(weights[ours], expected[theirs]), ours


def test_a_copy_of_the_tied_head_and_rotation_tables_are_left_alone(rewritten):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(5)

    assert "embedding.weight" in initialised(rewritten("llama3 tied", add)).weights()


def test_missing_extra_misshapen_and_unreadable_tensors_are_listed_by_name_at_once(rewritten, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.7.strange"] = torch.ones(2)
        tensors["model.norm.weight"] = torch.ones(33)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(HFError) as error:
        read(rewritten("qwen3 moe", change))
    first, *lines = str(error.value).split("\n  ")
    assert first.startswith(str(tmp_path))
    assert set(lines) == {
        "missing: model.layers.1.mlp.experts.3.up_proj.weight",
        "not part of the model: model.layers.7.strange",
        "of another shape: model.norm.weight [33] instead of [96]",
        "of a type that is not read: lm_head.weight (F8_E4M3)",
    }


def test_a_single_file_beside_an_index_is_read_alone_as_transformers_reads_it(hf, tmp_path, caplog):
    release = hf.release("llama3", tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).is_file() and not (tmp_path / SINGLE).is_file()
    tensors = {name: tensor.clone() for name, tensor in tensors_in(tmp_path).items()}
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    theirs = type(release.theirs).from_pretrained(tmp_path).state_dict()["model.norm.weight"]
    assert torch.equal(initialised(release).weights()["head.norm.weight"], theirs)
    assert torch.equal(theirs, tensors["model.norm.weight"])
    assert caplog.text.count(f"the weights are read from {SINGLE}") == 1


def test_a_file_that_is_truncated_or_no_file_of_tensors_is_named(hf, tmp_path):
    release, path = hf.release("llama3", tmp_path), tmp_path / SINGLE
    whole, opened = path.read_bytes(), read(release)
    for content, message in (
        (whole[:4], f"{SINGLE}: truncated"),
        (whole[:100], f"{SINGLE}: truncated"),
        (whole[:-1], f"{SINGLE}: truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    ):
        path.write_bytes(content)
        with pytest.raises(HFError, match=message):
            read(release)
    path.write_bytes(whole[:-1])  # after the check
    with pytest.raises(HFError, match=f"{SINGLE}: truncated: it ends inside"):
        initialised(release, opened)
    save_file({}, path)
    with pytest.raises(HFError, match="missing: model.embed_tokens.weight"):
        read(release)


def test_a_missing_shard_and_a_folder_without_weights_are_named(hf, tmp_path):
    release = hf.release("llama3", tmp_path, max_shard_size="20KB")
    (shard, *_) = sorted(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(HFError, match=f"files are missing: {shard.name}"):
        read(release)
    with pytest.raises(HFError, match="no such folder"):
        read(release, tmp_path / "nowhere")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": f"../{SINGLE}"}}))
    with pytest.raises(HFError, match="is not the name of a safetensors file beside it"):
        read(release)
    for path in (tmp_path / INDEX, *sorted(tmp_path.glob("model-*"))[1:]):
        path.unlink()
    (tmp_path / "training_args.bin").touch()  # a trainer's own file is not taken for weights
    with pytest.raises(
        HFError, match=r"neither model.safetensors nor .* \(found: config.json.*model-.*training_args.bin\)"
    ):
        read(release)


def test_the_smallest_scale_is_kept_and_the_reserved_one_is_not_a_number():
    blocks = torch.full((2, 16), 0x22, dtype=torch.uint8)
    smallest, reserved = dequantise(blocks, torch.tensor([0, 255], dtype=torch.uint8)).unflatten(0, (2, 32))
    assert (smallest == 2.0**-127).all() and reserved.isnan().all()


def test_reading_shows_how_much_is_read_up_to_all_of_it_and_short_reading_nothing(releases, monkeypatch, capsys):
    release = releases("qwen3 moe")
    capsys.readouterr()  # what wrote the release
    model, weights = release.family.build(release.config), read(release)
    HostStore(model).initialize(model, 0, weights.load)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "EVERY_S", 0.0)
    HostStore(model).initialize(model, 0, weights.load)
    assert capsys.readouterr().err.splitlines()[-1].endswith("(100 %)")

"""Hugging Face folders into the host store: every number in its place, and every fault named before reading."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.rounding import ties_up
from torchround.engine.store.bundles import ASYNC
from torchround.engine.store.host_store import HostStore
from torchround.hf import HFError, PretrainedWeights

KINDS = ["llama3", "llama3 tied", "qwen3", "qwen3 moe", "gpt_oss"]
SINGLE = "model.safetensors"


def read(release, folder=None):
    model = release.family.build(release.config)
    return PretrainedWeights(
        folder or release.folder,
        release.family.hf_names(release.config),
        model.stored_shapes(),
        release.family.hf_redundant(release.config),
    )


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def initialised(release, pretrained, dtype=torch.bfloat16, **options):
    model = release.family.build(release.config)
    store = HostStore(model, dtype, **options)
    store.initialize(model, 0, pretrained.load)
    return store


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_the_tensor_that_its_name_stands_for(kind, releases):
    release = releases(kind)
    assert len(list(release.folder.glob("*.safetensors"))) > 1
    stored = all_tensors(release.folder)
    store = initialised(release, read(release))
    names = release.family.hf_names(release.config)
    assert store.weights().keys() == names.keys()
    for name, weight in store.weights().items():
        tensors = names[name]
        expected = stored[tensors] if isinstance(tensors, str) else torch.stack([stored[t] for t in tensors])
        assert weight.dtype == torch.float32 and torch.equal(weight, expected.float()), name


def test_device_weights_of_every_version_follow_the_weights(releases):
    release = releases("llama3")
    store = initialised(release, read(release), policy=ASYNC)
    for bundle in store.bundles:
        assert len(bundle.device_weights) == 2
        for device_weight in bundle.device_weights:
            expected = ties_up(bundle.copy_weights(store.step), torch.bfloat16)
            assert torch.equal(device_weight, expected) and device_weight.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_file_of_another_type_is_read_too(dtype, hf, tmp_path):
    release = hf.release("llama3", tmp_path, dtype)
    assert (tmp_path / SINGLE).is_file()
    weights = initialised(release, read(release)).weights()
    expected = load_file(tmp_path / SINGLE)["model.norm.weight"].float()
    assert torch.equal(weights["head.norm.weight"], expected)


def test_mxfp4_experts_become_what_transformers_makes_of_them(hf, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    release = hf.release("gpt_oss", tmp_path)
    tensors, expected = load_file(tmp_path / SINGLE), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(110, 130, (experts, outputs, inputs // 32), generator=generator)
        quantised = blocks.to(torch.uint8), scales.to(torch.uint8)
        tensors |= dict(zip((f"{name}_blocks", f"{name}_scales"), quantised, strict=True))
        expected[name] = convert_moe_packed_tensors(*quantised, dtype=torch.float32)
    save_file(tensors, tmp_path / SINGLE)
    weights = initialised(release, read(release)).weights()
    names = release.family.hf_names(release.config)
    assert len(expected) == 4
    for ours, theirs in names.items():
        if theirs in expected:
            assert torch.equal(weights[ours], expected[theirs]), ours


def test_a_copy_of_the_tied_head_and_rotation_tables_are_left_alone(hf, tmp_path):
    release = hf.release("llama3 tied", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    save_file(tensors, tmp_path / SINGLE)
    assert "embedding.weight" in initialised(release, read(release)).weights()


def test_missing_extra_misshapen_and_unreadable_tensors_are_listed_by_name_at_once(hf, tmp_path):
    release = hf.release("qwen3 moe", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.7.strange"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(33)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(HFError) as error:
        read(release)
    lines = str(error.value).split("\n  ")
    assert lines[0].startswith(str(tmp_path))
    assert set(lines[1:]) == {
        "missing: model.layers.1.mlp.experts.3.up_proj.weight",
        "not part of the model: model.layers.7.strange",
        "of another shape: model.norm.weight [33] instead of [96]",
        "of a type that is not read: lm_head.weight (F8_E4M3)",
    }


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ({"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}, "an FP8"),
        ({"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}, "an AWQ or GPTQ"),
        ({"weight": torch.uint8, "weight.quant_state.bitsandbytes__nf4": torch.uint8}, "a bitsandbytes"),
    ],
)
def test_a_quantised_release_is_named_instead_of_all_of_its_tensors(names, kind, hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    for linear in [name for name in tensors if name.endswith("_proj.weight")]:
        del tensors[linear]
        stem = linear.removesuffix("weight")
        tensors |= {f"{stem}{name}": torch.zeros(2).to(dtype) for name, dtype in names.items()}
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(HFError) as error:
        read(release)
    assert f"this is {kind} release" in str(error.value) and len(str(error.value)) < 400


def test_a_single_file_beside_an_index_is_read_alone_as_transformers_reads_it(hf, tmp_path, caplog):
    release = hf.release("llama3", tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file() and not (tmp_path / SINGLE).is_file()
    tensors = {
        name: tensor.clone() for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    theirs = type(release.theirs).from_pretrained(tmp_path).state_dict()["model.norm.weight"]
    assert torch.equal(initialised(release, read(release)).weights()["head.norm.weight"], theirs)
    assert torch.equal(theirs, tensors["model.norm.weight"])
    assert caplog.text.count(f"the weights are read from {SINGLE}, as transformers does") == 1


def test_blocks_of_another_shape_are_named(hf, tmp_path):
    release = hf.release("gpt_oss", tmp_path)
    tensors, name = load_file(tmp_path / SINGLE), "model.layers.0.mlp.experts.down_proj"
    del tensors[name]
    tensors[f"{name}_blocks"] = torch.zeros(5, 96, 1, 16, dtype=torch.uint8)
    tensors[f"{name}_scales"] = torch.zeros(5, 96, 2, dtype=torch.uint8)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(HFError, match=r"down_proj_blocks \[5, 96, 1, 16\] instead of \[5, 96, 2, 16\]"):
        read(release)


@pytest.mark.parametrize("kept_bytes", [4, 100, -1])
def test_a_truncated_file_is_named(kept_bytes, hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    path = tmp_path / SINGLE
    whole = path.read_bytes()
    path.write_bytes(whole[:kept_bytes] if kept_bytes > 0 else whole[:-1])
    with pytest.raises(HFError, match=f"{SINGLE}: truncated"):
        read(release)


def test_a_file_cut_after_the_check_is_named_when_it_is_read(hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    pretrained = read(release)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-1])
    with pytest.raises(HFError, match=f"{SINGLE}: truncated: it ends inside"):
        initialised(release, pretrained)


def test_a_git_lfs_pointer_is_called_by_its_name(hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(HFError, match="git lfs pull"):
        read(release)


def test_a_missing_shard_and_a_folder_without_weights_are_named(hf, tmp_path):
    release = hf.release("llama3", tmp_path, max_shard_size="20KB")
    (shard, *_) = sorted(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(HFError, match=f"files are missing: {shard.name}"):
        read(release)
    with pytest.raises(HFError, match="no such folder"):
        read(release, tmp_path / "nowhere")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(HFError, match=r"neither model.safetensors nor .* \(found: config.json"):
        read(release)


def test_an_index_cannot_point_outside_its_folder(hf, tmp_path):
    release = hf.release("llama3", tmp_path / "release")
    (tmp_path / "release" / SINGLE).rename(tmp_path / SINGLE)
    index = {"weight_map": {"model.norm.weight": f"../{SINGLE}"}}
    (tmp_path / "release" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HFError, match="is not the name of a safetensors file beside it"):
        read(release)


def test_a_file_without_tensors_lacks_them_all(hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    save_file({}, tmp_path / SINGLE)
    with pytest.raises(HFError, match="missing: model.embed_tokens.weight"):
        read(release)


def test_a_trainers_own_files_are_not_taken_for_weights(hf, tmp_path):
    release = hf.release("llama3", tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(HFError, match=r"found: .*model-00001-of-00002.safetensors.*training_args.bin\)"):
        read(release)

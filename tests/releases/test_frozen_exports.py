"""Exports of FP8 and MXFP4 releases that keep codes of what training left as it was, loaded by transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from tests.support.releases import SETTINGS, releases
from tests.support.small_run import working_in
from tests.support.toy_release import SINGLE, load_model, write_release
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf

RELEASES = {release.name.split("/")[1]: release for release in releases()}
QUERIES = "--lora.targets=['q_proj']"
# The release, what is trained, and a tensor that stays packed; with all weights trained only a tower stays.
ROWS = {
    "blocks, attention trained": ("MiniMax-M2.5", [QUERIES], "layers.1.block_sparse_moe.experts.0.w1.weight"),
    "blocks of latent attention": ("DeepSeek-V3", ["--lora.targets=['q_b_proj']"], "layers.0.mlp.down_proj.weight"),
    "whole matrices in a wrapper": ("Devstral-Small-2-24B-Instruct-2512", [QUERIES], "layers.1.mlp.up_proj.weight"),
    "all trained": ("MiniMax-M2.5", ["--lora.rank=0"], None),
}


def exported(name, *more):
    code = export_hf.main([str(Path("outputs/run/checkpoints") / checkpoint_name(1)), name, "--config=run.toml", *more])
    assert code == 0
    return load_file(Path(name) / SINGLE), json.loads((Path(name) / "config.json").read_text())


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.releases] * (number > 0)) for number, row in enumerate(ROWS)]
)
def test_weights_that_did_not_change_keep_their_codes_byte_for_byte(row, tmp_path):
    name, more, example = ROWS[row]
    release = RELEASES[name]
    with working_in(tmp_path):
        write_release(Path("release"), release.config, release.tokenizer)
        Path("text.jsonl").write_text(
            "".join(json.dumps({"text": f"{n} bottles, {n * n} walls"}) + "\n" for n in range(60))
        )
        Path("run.toml").write_text(SETTINGS)
        assert (
            train.main(["--config=run.toml", "--training.steps=1", "--lora.rank=2", "--training.dtype=bfloat16", *more])
            == 0
        )
        released = load_file(Path("release") / SINGLE)
        packed, config = exported("packed", "--frozen=original")
        numbers, plain_config = exported("numbers")
        assert "quantization_config" not in plain_config
        codes = {name for name, tensor in released.items() if tensor.dtype == torch.float8_e4m3fn}
        kept = {name for name in codes if packed[name].dtype == torch.float8_e4m3fn}
        for stem in kept:
            for part in (stem, f"{stem}_scale_inv", f"{stem.removesuffix('weight')}activation_scale"):
                if part in released:
                    ours, theirs = (one[part].reshape(-1).view(torch.uint8) for one in (packed, released))
                    assert torch.equal(ours, theirs), part
        if example is None:
            assert not kept and packed.keys() == numbers.keys() and config == plain_config
            return
        assert any(stem.endswith(example) for stem in kept)
        # Projections that programs run as one are of one format.
        trained = {stem.rpartition(".")[0].rpartition(".")[0] for stem in codes - kept}
        assert trained and not any(stem.rpartition(".")[0].rpartition(".")[0] in trained for stem in kept)
        # Without a GPU transformers loads codes as numbers in bf16: of the export as of the release.
        ours, base, theirs = (load_model(Path(folder)).state_dict() for folder in ("packed", "release", "numbers"))
        from_base = [weight for weight, found in ours.items() if torch.equal(found, base[weight].to(found.dtype))]
        others = ours.keys() - from_base
        assert from_base and others and all(torch.equal(ours[one].float(), theirs[one]) for one in others)

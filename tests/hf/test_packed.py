"""Weights in FP8 against what transformers makes of the same codes and scales, and every fault of a scale named."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import forward as reader
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.support.released_run import saved_config
from tests.support.small_run import tensors_in
from torchround.checkpoint import Checkpointer
from torchround.commands import export_hf
from torchround.commands.configured_model import open_weights
from torchround.engine.store.host_store import HostStore
from torchround.hf import HFError, quantised_advice
from torchround.hf.packed import read_numbers
from torchround.hf.tensor_folder import TensorFiles
from torchround.layer import names_in

SINGLE = "model.safetensors"
BLOCK = (32, 48)
FINE = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
WHOLE = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
ROWS = {**COMPRESSED, "config_groups": {"group_0": {"weights": WEIGHTS | {"strategy": "channel"}}}}
OLD_BLOCKS = {"group_0": {"weights": WEIGHTS | {"strategy": "block", "block_structure": list(BLOCK)}}}
# By name: the release, the table of its config, the ending of scales, their type, and what one scale is for.
FORMATS = {
    "blocks": ("qwen3 moe", FINE, "_scale_inv", torch.float32, BLOCK),
    "blocks of powers of two": ("qwen3 moe", FINE, "_scale_inv", torch.float8_e8m0fnu, BLOCK),
    "blocks of powers of two in bytes": ("qwen3 moe", FINE, "_scale_inv", torch.uint8, BLOCK),
    "stacks of experts": ("gpt_oss", FINE, "_scale_inv", torch.bfloat16, BLOCK),
    "whole matrices": ("qwen3", WHOLE, "_scale_inv", torch.float32, None),
    "rows of compressed-tensors": ("llama3", ROWS, "_scale", torch.bfloat16, (1, 10**6)),
    "blocks of compressed-tensors": (
        *("llama3", {**COMPRESSED, "config_groups": OLD_BLOCKS}),
        *("_scale", torch.float32, BLOCK),
    ),
}


def pack(matrix, dtype, block, generator):
    """Draw codes and scales of the shape of `matrix`. Return them, and the numbers that transformers makes of them."""
    codes = torch.randn(matrix.shape, generator=generator).mul_(100).to(torch.float8_e4m3fn)
    *stack, rows, columns = matrix.shape
    high, wide = (rows, columns) if block is None else (min(block[0], rows), min(block[1], columns))
    grid = (*stack, -(-rows // high), -(-columns // wide))
    powers = torch.randint(118, 130, grid, generator=generator).to(torch.uint8)
    scales = torch.rand(grid, generator=generator).add_(0.01).to(dtype) if dtype.itemsize > 1 else powers.view(dtype)
    # Its blocks are of one size, so a matrix is filled up to a multiple of it.
    whole = torch.zeros((*stack, grid[-2] * high, grid[-1] * wide)).to(codes.dtype)
    whole[..., :rows, :columns] = codes
    numbers = Fp8Dequantize(None)._dequantize_one(whole, scales, torch.bfloat16)[..., :rows, :columns]
    return codes, scales[..., 0, 0] if block is None else scales, numbers


def packed_release(hf, folder, name, change=None):
    """Write a release whose matrices in blocks are packed. Return it with its numbers by tensor."""
    kind, table, ending, dtype, block = FORMATS[name]
    release, generator = hf.release(kind, folder), torch.Generator().manual_seed(0)
    tensors, numbers = load_file(folder / SINGLE), {}
    for tensor in sorted(tensors):
        if tensors[tensor].ndim < 2 or ".layers." not in tensor or "bias" in tensor or "sinks" in tensor:
            numbers[tensor] = tensors[tensor]
            continue
        tensors[tensor], scales, numbers[tensor] = pack(tensors[tensor], dtype, block, generator)
        tensors[f"{tensor}{ending}"] = scales
        if name == "whole matrices":
            tensors[f"{tensor.removesuffix('weight')}activation_scale"] = torch.ones(())
    if change is not None:
        change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / SINGLE)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": table}))
    return release, numbers


def store_of(release):
    model = release.family.build(release.config)
    weights = open_weights(release.folder, release.family, release.config, model.stored_shapes())
    store = HostStore(model, torch.bfloat16)
    store.initialize(model, 0, weights.load)
    return weights, store


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_read_and_exported_as_what_transformers_makes_of_them(name, hf, tmp_path, monkeypatch):
    # Pieces that begin and end inside rows.
    monkeypatch.setattr("torchround.hf.tensor_folder.PIECE_BYTES", 200)
    release, numbers = packed_release(hf, tmp_path / "release", name)
    weights, store = store_of(release)
    stored = store.weights()
    for ours, held in weights.names.items():
        expected = torch.stack([numbers[tensor] for tensor in names_in(held)])
        assert torch.equal(stored[ours], expected.float().view(stored[ours].shape)), ours
    assert not weights.map_tensors(
        [name for name in stored if "block" in name and "norm" not in name], torch.float8_e4m3fn
    )
    run = saved_config(model={"family": release.family.name, "hf_path": str(release.folder)})
    checkpoint = Checkpointer(tmp_path / "checkpoints").save(3, store.named_views(), {"config": run})
    output = tmp_path / "exported"
    assert export_hf.main([str(checkpoint), str(output), f"--model.hf_path={release.folder}"]) == 0
    exported = tensors_in(output)
    assert exported.keys() == numbers.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in numbers.items())
    assert "quantization_config" not in json.loads((output / "config.json").read_text())


@pytest.mark.parametrize("name", [name for name in FORMATS if "compressed" in name])
def test_the_reader_of_compressed_tensors_makes_the_same_numbers(name, hf, tmp_path):
    release, _ = packed_release(hf, tmp_path / "release", name)
    settings = QuantizationArgs(**FORMATS[name][1]["config_groups"]["group_0"]["weights"])
    released, compared = load_file(release.folder / SINGLE), 0
    with TensorFiles() as files:
        for tensor in read_numbers(release.folder).values():
            if len(tensor.parts) > 1:
                codes, scales = (released[part.name] for part in tensor.parts)
                theirs = reader.dequantize(codes, scales, args=settings, dtype=torch.float32).bfloat16()
                ours = tensor.read(files, 0, tensor.nbytes).view(torch.bfloat16).view(tensor.shape)
                assert torch.equal(ours, theirs), tensor.name
                compared += 1
    assert compared


MATRIX = "model.layers.1.self_attn.k_proj.weight"
SCALES = f"{MATRIX}_scale_inv"
FAULTS = {
    "no scale": (lambda tensors: tensors.pop(SCALES), f"{MATRIX} is in FP8, but has no scale"),
    "another shape": (
        lambda tensors: tensors.update({SCALES: torch.ones(2, 2)}),
        rf"{SCALES} F32 \[2, 2\]; legal: .*each block of 32 x 48",
    ),
    "another type": (
        lambda tensors: tensors.update({SCALES: tensors[SCALES].to(torch.int32)}),
        rf"{SCALES} I32 .*; legal: .*F8_E8M0",
    ),
    "not a number": (lambda tensors: tensors[SCALES].fill_(torch.nan), f"{SCALES} holds a scale that is not a finite"),
    "infinite": (lambda tensors: tensors[SCALES].fill_(torch.inf), f"{SCALES} holds a scale that is not a finite"),
    "a scale without codes": (
        lambda tensors: tensors.update({MATRIX: tensors[MATRIX].bfloat16()}),
        f"not part of the model: {SCALES}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_scale_is_named(fault, hf, tmp_path):
    change, message = FAULTS[fault]
    release, _ = packed_release(hf, tmp_path, "blocks", change)
    with pytest.raises(HFError, match=message):
        store_of(release)


def test_a_release_that_is_not_read_names_a_way():
    assert "dequantize" in quantised_advice({"quant_method": "bitsandbytes", "load_in_4bit": True})
    nvfp4 = {**COMPRESSED, "format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4}}}}
    assert "run_compressed=False" in quantised_advice(nvfp4)
    for method in ("awq", "gptq", "modelopt"):
        assert f"({method}) release" in quantised_advice({"quant_method": method})
    assert quantised_advice(ROWS) is quantised_advice(FINE) is quantised_advice({}) is None

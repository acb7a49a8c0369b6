"""Host memory while a Hugging Face folder is read into the store."""

import resource

import pytest
import torch
from safetensors.torch import save_file

from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights
from torchround.models import FAMILIES, LoraShape, add_adapters, pack_base
from torchround.packed_formats import FORMATS
from torchround.run.packed_base import PackedBase

FAMILY = FAMILIES["llama3"]
SIZES = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 64, "ffn_size": 4437}
CONFIG = FAMILY.config_from_flavor("debug", num_layers=6, vocab_size=8000, **SIZES)  # 117 M parameters
# All of its matrices are cut into whole groups, and a tenth of its packed weights is more than a piece of 8 MiB.
PACKED_CONFIG = FAMILY.config_from_flavor("debug", num_layers=3, vocab_size=8000, **SIZES | {"ffn_size": 17408})


def read_packed_weights(base):
    """Pack the frozen weights of a run with adapters, by `PackedBase` as a start does."""
    model = FAMILY.build(PACKED_CONFIG)
    add_adapters(model, FAMILY.module_names(PACKED_CONFIG), LoraShape(2, 4.0, 0.0, ("q_proj",)))
    shapes = model.stored_shapes()
    model = pack_base(model, FORMATS[base])
    names = FAMILY.hf_names(PACKED_CONFIG)
    weights = PretrainedWeights(".", names, {name: shapes[name] for name in names})
    store = HostStore(model, torch.bfloat16)
    for bundle in store.bundles:
        for flat in (*bundle.state(), *bundle.device_weights) if bundle.trainable else bundle.device_weights:
            flat.zero_()
    FORMATS[base].pack(torch.zeros(256), torch.empty(FORMATS[base].nbytes(256), dtype=torch.uint8))  # compiles
    before = peak_bytes()
    PackedBase(model, weights, None).fill(store)
    print(peak_bytes() - before, store.nbytes())


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_weights():
    model = FAMILY.build(CONFIG)
    weights = PretrainedWeights(".", FAMILY.hf_names(CONFIG), model.stored_shapes())
    store = HostStore(model, torch.bfloat16)
    # A page that was never written is not resident, and a second copy of the weights could hide there.
    for bundle in store.trained:
        for flat in (*bundle.state(), *bundle.device_weights):
            flat.zero_()
    before = peak_bytes()
    store.initialize(model, 0, weights.load)
    print(peak_bytes() - before, weights.bytes_of(model.stored_shapes()), store.nbytes())


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True])
def test_reading_weights_takes_no_second_copy_of_the_model(packed, processes, tmp_path):
    names, shapes = FAMILY.hf_names(CONFIG), FAMILY.build(CONFIG).stored_shapes()
    tensors = {names[name]: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if packed and len(shape) == 2:
            rows, columns = (-(-size // 128) for size in shape)
            tensors[names[name]] = tensors[names[name]].to(torch.float8_e4m3fn)
            tensors[f"{names[name]}_scale_inv"] = torch.ones(rows, columns)
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [128, 128]}}')
    save_file(tensors, tmp_path / "model.safetensors")
    child = processes.run("tests.hf.test_reading_memory:read_weights", folder=tmp_path)
    assert child.wait() == 0, child.text()
    # A slow machine prints a line of progress before the numbers.
    extra_bytes, file_bytes, store_bytes = map(int, child.text().splitlines()[-1].split())
    # The largest parameter in fp32, 33 MB, until it is split, pieces of 8 MiB and what a process uses besides.
    assert extra_bytes < (0.1 * store_bytes if packed else 0.8 * file_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("base", FORMATS)
def test_packing_weights_on_the_way_in_takes_a_tenth_of_the_result_besides(base, processes, tmp_path):
    names, shapes = FAMILY.hf_names(PACKED_CONFIG), FAMILY.build(PACKED_CONFIG).stored_shapes()
    tensors = {names[name]: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    child = processes.run("tests.hf.test_reading_memory:read_packed_weights", base, folder=tmp_path)
    assert child.wait() == 0, child.text()
    extra_bytes, store_bytes = map(int, child.text().splitlines()[-1].split())
    assert extra_bytes < 0.1 * store_bytes, f"{extra_bytes / store_bytes:.3f} of {store_bytes}"

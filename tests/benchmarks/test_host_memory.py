"""Host memory: a step adds none to the store, which takes what is planned; and the peak while weights are read."""

import gc

import pytest
import torch
from torch import Tensor

from benchmarks.host_memory import CASES, FAMILY, LOADING, ONE_SHORT_SEQUENCE, TRAINING
from benchmarks.plain_loops import random_step
from torchround.engine.engine import Engine
from torchround.engine.reports import one_layer_a_stage
from torchround.engine.settings import EngineSettings
from torchround.planning.memory import PROGRAM_BYTES
from torchround.run.engine_parts import build_store
from torchround.run.hardware import Hardware
from torchround.run.numbers import run_question

HARDWARE = Hardware("cpu", 1, device_bytes=2**30)
# Sizes that need no padding, except in vectors.
SIZES = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_size": 512}
CONFIG = FAMILY.config_from_flavor("debug", **SIZES, vocab_size=512)


def tensors():
    return (found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter))


def storages():
    """Return the bytes of every tensor's memory in this process by address."""
    gc.collect()
    # Other tests may have left sparse ones, which have no storage.
    dense = (tensor for tensor in tensors() if tensor.layout == torch.strided)
    found = (tensor.untyped_storage() for tensor in dense if tensor.device.type == "cpu")
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("case", [pytest.param(CASES[5], marks=pytest.mark.nightly), CASES[-2]], ids=str)
def test_a_step_adds_no_host_memory_to_the_store_which_takes_what_is_planned(case):
    model = FAMILY.build(CONFIG)
    micro_batches = random_step(ONE_SHORT_SEQUENCE, CONFIG.vocab_size, torch.Generator().manual_seed(0))
    before = storages()
    store = build_store(model, case.numbers, HARDWARE)
    store.initialize(model, seed=0)
    settings = EngineSettings(clip="layer" if case.update == "bounded" else "global")
    [device] = HARDWARE.make_devices()
    partition = one_layer_a_stage(len(model.layers))
    optimizer = case.numbers.optimizer
    with Engine(model, store, [device], partition, optimizer=optimizer, settings=settings) as engine:
        engine.forward_backward(micro_batches)
        engine.step(1e-3)
        engine.drain()
    held = sum(nbytes for address, nbytes in storages().items() if address not in before)
    assert held == pytest.approx(store.nbytes(), rel=0.002)  # and a few numbers of the step
    planned = run_question(model, case.numbers, HARDWARE).state().state_bytes
    assert planned == pytest.approx(store.nbytes(), rel=0.002)


@pytest.mark.nightly
def test_a_process_takes_what_is_planned_and_the_program():
    figures = TRAINING.measure(TRAINING.parse("training-memory", ["--blocks", "1"]))
    [found] = figures["cases"].values()
    # Without one of the model's 16-bit buffers, or with one twice, it would be 2 bytes away. The rest is of libraries.
    assert found["resident_bytes_per_parameter"] == pytest.approx(found["planned_bytes_per_parameter"], abs=1)
    # Versions and builds of PyTorch differ, and what is installed beside it.
    assert PROGRAM_BYTES / 2 < 1e6 * found["program_mb"] < 2 * PROGRAM_BYTES


@pytest.mark.nightly
def test_reading_weights_takes_no_second_copy_of_the_model():
    figures = LOADING.measure(LOADING.parse("loading-memory", ["--parameters", "120e6"]))
    # Less than the store would mean that its pages were not resident, and that a second copy could hide there.
    assert 1 <= figures["peak_over_store"] < 1.15
    # The largest parameter in fp32, 33 MB, until it is split, pieces of 8 MiB and what a process uses besides: about
    # 100 MB, whatever the size of the model. A second copy would be the file's 234 MB more.
    assert figures["beyond_store_bytes"] < 0.8 * figures["file_bytes"]

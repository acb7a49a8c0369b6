"""Memory figures: bytes per parameter of every optimizer as the page says, and the peak while weights are read."""

import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.host_memory import CASES, FAMILY, LOADING, ONE_SHORT_SEQUENCE, TRAINING, MemoryCase, training_misses
from benchmarks.plain_loops import random_step
from torchround.engine.engine import Engine
from torchround.engine.results import one_layer_a_stage
from torchround.engine.settings import EngineSettings
from torchround.pipeline.memory import PROGRAM_BYTES
from torchround.run.engine_parts import build_store
from torchround.run.hardware import Hardware
from torchround.run.numbers import run_question

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
HARDWARE = Hardware("cpu", 1, device_bytes=2**30)
# Sizes that need no padding, except in vectors.
CONFIG = replace(
    FAMILY.config_from_flavor("debug"),
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=512,
    vocab_size=512,
)


def tensors() -> Iterator[Tensor]:
    return (found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter))


def storages() -> dict[int, int]:
    """Return the bytes of every tensor's memory in this process by address."""
    gc.collect()
    # Other tests may have left sparse ones, which have no storage.
    dense = (tensor for tensor in tensors() if tensor.layout == torch.strided)
    found = (tensor.untyped_storage() for tensor in dense if tensor.device.type == "cpu")
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def bytes_on_the_page(case: MemoryCase) -> tuple[float, float]:
    """Return the bytes of a parameter that AdamW updates and of a matrix of the case's optimizer."""
    column = 1 + ["sync", "async", "bounded", "predict"].index(
        case.correction if case.correction != "none" else case.update
    )
    lines = re.findall(rf"^\| (?:AdamW|Muon), {case.state}.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    adamw, muon = (float(line.split("|")[column + 1].replace("-", "nan")) for line in lines)
    return adamw, muon if case.optimizer == "muon" else adamw


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_store_takes_the_bytes_of_the_page_and_a_step_adds_none(case: MemoryCase) -> None:
    model = FAMILY.build(CONFIG)
    shapes = model.stored_shapes()
    matrices = sum(shape.numel() for name, shape in shapes.items() if name.startswith("block.") and len(shape) == 2)
    others = sum(shape.numel() for shape in shapes.values()) - matrices
    adamw, own = bytes_on_the_page(case)
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
    # Alignment of vectors and a few numbers of the step.
    assert held == pytest.approx(adamw * others + own * matrices, rel=0.01)
    assert held == pytest.approx(store.nbytes(), rel=0.002)
    planned = run_question(model, case.numbers, HARDWARE).state().state_bytes
    assert planned == pytest.approx(store.nbytes(), rel=0.002)


def test_a_process_takes_what_is_planned_and_the_program() -> None:
    figures = TRAINING.measure(TRAINING.parse("training-memory", ["--blocks", "1"]))
    [found] = figures["cases"].values()
    # Without one of the model's 16-bit buffers, or with one twice, it would be 2 bytes away. The rest is of libraries.
    assert found["resident_bytes_per_parameter"] == pytest.approx(found["planned_bytes_per_parameter"], abs=1)
    # Versions and builds of PyTorch differ, and what is installed beside it.
    assert PROGRAM_BYTES / 2 < 1e6 * found["program_mb"] < 2 * PROGRAM_BYTES


def test_a_case_above_its_bound_or_away_from_its_plan_is_named() -> None:
    def figures(resident: float, store: float, planned: float) -> dict[str, object]:
        kinds = {"resident": resident, "store": store, "planned": planned}
        found = {f"{kind}_bytes_per_parameter": value for kind, value in kinds.items()}
        return {"cases": {"adamw exact, sync": found}}

    assert training_misses(figures(14.2, 14.1, 14.0)) == []
    [missed] = training_misses(figures(14.41, 14.2, 14.2))
    assert "at most 14.4" in missed
    [missed] = training_misses(figures(14.2, 13.5, 14.0))
    assert "the store takes 13.50" in missed
    [missed] = training_misses(figures(14.3, 14.0, 14.0))
    assert "14.30 resident" in missed and "planned 14.00" in missed


def test_reading_weights_takes_no_second_copy_of_the_model() -> None:
    figures = LOADING.measure(LOADING.parse("loading-memory", ["--parameters", "120e6"]))
    # Less than the store would mean that its pages were not resident, and that a second copy could hide there.
    assert 1 <= figures["peak_over_store"] < 1.15
    # The largest parameter in fp32, 33 MB, until it is split, pieces of 8 MiB and what a process uses besides: about
    # 100 MB, whatever the size of the model. A second copy would be the file's 234 MB more.
    assert figures["beyond_store_bytes"] < 0.8 * figures["file_bytes"]

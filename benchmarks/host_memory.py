"""Host memory: bytes per trained parameter while training, and the peak while reading a Hugging Face folder."""

import argparse
import ctypes
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from benchmarks.frame import Benchmark, Report, in_fresh_process, peak_bytes, reset_peak, resident_bytes
from benchmarks.plain_loops import LR, random_step
from benchmarks.study import markdown
from torchround.config import EngineTable, TrainingTable
from torchround.config.optimizer_tables import optimizer_tables
from torchround.engine.engine import Engine
from torchround.engine.reports import one_layer_a_stage
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights
from torchround.models import FAMILIES
from torchround.models.common.config import TransformerConfig
from torchround.planning.plan_report import host_memory, plan_for
from torchround.run.engine_parts import build_store
from torchround.run.hardware import Hardware
from torchround.run.numbers import RunNumbers, run_question

FAMILY = FAMILIES["llama3"]
ONE_SHORT_SEQUENCE = TrainingTable(seq_len=16, global_batch_size=1, micro_batch_size=1)
SHARD_BYTES = 200_000_000
MOST_PEAK_OVER_STORE = 1.15


# While training.


@dataclass(frozen=True)
class MemoryCase:
    """What decides the bytes per parameter: the optimizer, the format of its state, and the update policy."""

    optimizer: str
    state: str
    update: str
    correction: str = "none"

    def __str__(self) -> str:
        corrected = "" if self.correction == "none" else " with prediction"
        return f"{self.optimizer} {self.state}, {self.update}{corrected}"

    @property
    def numbers(self) -> RunNumbers:
        """The settings of a run that trains one short sequence in bfloat16."""
        engine = EngineTable(update=self.update, delay_correction=self.correction)
        table = optimizer_tables()[self.optimizer].model_validate({"state": self.state})
        return RunNumbers(ONE_SHORT_SEQUENCE, engine, optimizer=table)


# Most resident bytes per trained parameter.
BOUNDS: Mapping[MemoryCase, float] = {
    MemoryCase("adamw", "exact", "sync"): 14.4,
    MemoryCase("adamw", "exact", "async"): 16.4,
    MemoryCase("adamw", "compact", "sync"): 8.5,
    MemoryCase("adamw", "compact", "async"): 10.5,
}
CASES = [
    *BOUNDS,
    *(MemoryCase("adamw", state, "bounded") for state in ("exact", "compact")),
    *(MemoryCase("adamw", state, "async", "predict") for state in ("exact", "compact")),
    *(MemoryCase("muon", state, update) for state in ("exact", "compact") for update in ("sync", "async")),
]
# How far the store's bytes and the resident ones may be from the plan's, as a fraction.
MOST_FROM_PLAN = 0.02
KINDS = ("planned", "store", "resident")
# `M_MMAP_THRESHOLD` of glibc's malloc.h: blocks of this size and above go back to the system as soon as they are freed.
MMAP_THRESHOLD, MAPPED_BYTES = -3, 128 * 1024


def training_options(parser: argparse.ArgumentParser) -> None:
    """Add what is measured and the size."""
    parser.add_argument("--update", choices=sorted(POLICIES), default="sync", help="update policy")
    parser.add_argument("--correction", choices=("none", "predict"), default="none", help="of `async`")
    parser.add_argument(
        "--optimizer", choices=sorted(optimizer_tables()), default="adamw", help="name of the optimizer"
    )
    parser.add_argument("--state", choices=("exact", "compact"), default="exact", help="format of its state")
    parser.add_argument("--all", action="store_true", help="measure every optimizer, state and policy")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of 12.8 M parameters")


def training_memory(options: argparse.Namespace) -> Report:
    """Measure each case in a process of its own."""
    asked = MemoryCase(options.optimizer, options.state, options.update, options.correction)
    found = {}
    for case in CASES if options.all else [asked]:
        found[str(case)] = in_fresh_process(train_tiny_then_large, case, options.blocks)
    return {"cases": found}


def train_tiny_then_large(case: MemoryCase, blocks: int) -> Report:
    """Train a tiny model, then the measured one, and report resident bytes per parameter of the second."""
    large = replace(
        FAMILY.config_from_flavor("debug_25m"),
        num_layers=blocks,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=3072,
        vocab_size=25600,
    )
    tiny = replace(
        large, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, ffn_size=128, vocab_size=512
    )
    give_back_at_once()
    # Python, PyTorch and what PyTorch imports for a first step are the same for every model.
    added_by_training(tiny, case)
    program = resident_bytes()
    found = added_by_training(large, case)
    parameters = found["parameters"]
    return {
        "parameters": parameters,
        "planned_bytes_per_parameter": found["planned"] / parameters,
        "store_bytes_per_parameter": found["store"] / parameters,
        "resident_bytes_per_parameter": found["added"] / parameters,
        "resident_above_plan": found["added"] / found["planned"] - 1,
        "program_mb": program / 1e6,
        "virtual_device_mb": found["device"] / 1e6,
        "whole_process_mb": (program + found["added"] + found["device"]) / 1e6,
    }


def added_by_training(config: TransformerConfig, case: MemoryCase) -> dict[str, float]:
    """Train two steps. Return the resident bytes that they added, the store's, the plan's and the parameters.

    The buffers of the virtual device are subtracted: on a GPU they are not host memory. The plan's bytes are all that
    a dry run counts but these.
    """
    gc.collect()
    before = resident_bytes()
    model, numbers = FAMILY.build(config), case.numbers
    hardware = Hardware("cpu", 1, device_bytes=2**40)
    store = build_store(model, numbers, hardware)
    store.initialize(model, seed=0)
    [device] = hardware.make_devices()
    partition = one_layer_a_stage(len(model.layers))
    micro_batches = random_step(ONE_SHORT_SEQUENCE, config.vocab_size, torch.Generator().manual_seed(0))
    settings = EngineSettings(clip="layer" if case.update == "bounded" else "global")
    with Engine(model, store, [device], partition, optimizer=numbers.optimizer, settings=settings) as engine:
        for _ in range(2):
            engine.forward_backward(micro_batches)
            engine.step(LR)
        engine.drain()
        gc.collect()
        added = resident_bytes() - before - device.peak_bytes()
    question = replace(run_question(model, numbers, hardware), given=(partition, 1))
    planned = host_memory(question, plan_for(question))
    return {
        "added": added,
        "planned": planned.total_bytes - planned.device_bytes,
        "store": store.nbytes(),
        "device": device.peak_bytes(),
        "parameters": store.num_parameters(),
    }


def give_back_at_once() -> None:
    """Let the C library return freed tensors to the system, if it can be told to (glibc).

    Otherwise it keeps blocks of up to 32 MiB, and up to 64 MiB for each thread, for tensors to come. Here those are the
    temporary tensors of the virtual device's layers, which a GPU has in its own memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MAPPED_BYTES)


def training_misses(figures: Report) -> list[str]:
    """Return the cases that take more than they may, or that are not what the plan says."""
    bounds, missed = {str(case): bound for case, bound in BOUNDS.items()}, []
    for name, found in figures["cases"].items():
        planned, store, resident = (found[f"{kind}_bytes_per_parameter"] for kind in KINDS)
        if resident > bounds.get(name, math.inf):
            missed.append(f"{name}: {resident:.2f} resident bytes per parameter, at most {bounds[name]}")
        if abs(store / planned - 1) > MOST_FROM_PLAN:
            missed.append(f"{name}: the store takes {store:.2f} bytes per parameter, planned {planned:.2f}")
        if abs(resident / planned - 1) > MOST_FROM_PLAN:
            missed.append(f"{name}: {resident:.2f} resident bytes per parameter, planned {planned:.2f}")
    return missed


def training_table(figures: Report) -> str:
    """Return the table of docs/optimizers.md."""
    rows = [
        [
            name,
            *(f"{found[f'{kind}_bytes_per_parameter']:.2f}" for kind in KINDS),
            f"{found['resident_above_plan']:+.1%}".replace("%", " %"),
            f"{found['whole_process_mb']:.0f}",
        ]
        for name, found in figures["cases"].items()
    ]
    return markdown(["bytes per trained parameter", *KINDS, "above the plan", "whole process, MB"], rows)


def training_headline(figures: Report) -> tuple[str, str]:
    """Return the resident bytes of each case, and what their stores hold."""
    cases = figures["cases"].items()
    resident = "; ".join(f"{name}: {found['resident_bytes_per_parameter']:.2f}" for name, found in cases)
    stores = ", ".join(f"{found['store_bytes_per_parameter']:.2f}" for _, found in cases)
    return (
        f"resident bytes per trained parameter: {resident}",
        f"stores {stores}; RoundPipe 20.3 to 21.6 (published)",
    )


TRAINING = Benchmark(
    """Resident host bytes per trained parameter, beside what a process of the same kind holds before.

Trains two short steps of a Llama-shaped model in bf16 (304 M parameters by default) after two steps of a model of 80
thousand parameters, and subtracts the buffers of the virtual device, which on a GPU are not host memory. The C library
gives freed tensors back at once. The whole process is printed too: the program, the virtual device, and the rest.
--check asks for the bounds of AdamW, and for a store and a process within 2 % of what a plan counts.""",
    training_options,
    training_memory,
    training_headline,
    "--blocks 1",
    training_misses,
    training_table,
)


# While reading weights.


def loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the size."""
    parser.add_argument("--parameters", type=float, default=500e6, help="size of the model")


def loading_memory(options: argparse.Namespace) -> Report:
    """Write a folder of random weights, and read it in a process of its own."""
    needed = 16 * options.parameters
    if psutil.virtual_memory().available < needed:
        sys.exit(f"{needed / 2**30:.1f} GiB of free memory are needed")
    config = loaded_config(max(1, round((options.parameters - 16.4e6) / 16.8e6)))
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), config)
        return in_fresh_process(read_folder, Path(folder), config)


def loaded_config(num_layers: int) -> TransformerConfig:
    """Return the settings of a model with about 16.8 M parameters in each block."""
    config = FAMILY.config_from_flavor("debug", num_layers=num_layers, vocab_size=8000)
    return replace(config, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=64, ffn_size=4437)


def write_folder(folder: Path, config: TransformerConfig) -> None:
    """Write random weights in bf16, in files of about `SHARD_BYTES`."""
    shapes = FAMILY.build(config).stored_shapes()
    file_of: dict[str, str] = {}
    for number, tensors in enumerate(shards(FAMILY.hf_names(config), shapes)):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        file_of |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def shards(names: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> Iterator[dict[str, torch.Tensor]]:
    """Draw the tensors file by file."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors[names[name]] = torch.randn(shape, dtype=torch.bfloat16)
        if sum(tensor.nbytes for tensor in tensors.values()) > SHARD_BYTES:
            yield tensors
            tensors = {}
    if tensors:
        yield tensors


def read_folder(folder: Path, config: TransformerConfig) -> Report:
    """Read the folder into a store, and compare the peak with what the store holds."""
    torch.zeros(1).to(torch.bfloat16)  # what torch allocates once does not belong to reading
    model = FAMILY.build(config)
    reset_peak()
    before = resident_bytes()
    store = HostStore(model, torch.bfloat16)
    # Reading writes no optimizer state, and a page that was never written is not resident. Without this the peak would
    # stay far below the store's size, and a second copy of the weights would not show.
    for bundle in store.trained:
        for flat in bundle.state():
            flat.zero_()
    start_s = time.perf_counter()
    pretrained = PretrainedWeights(folder, FAMILY.hf_names(config), model.stored_shapes())
    store.initialize(model, 0, pretrained.load)
    seconds = time.perf_counter() - start_s
    grown = peak_bytes() - before
    file_bytes = pretrained.bytes_of(model.stored_shapes())
    return {
        "parameters": store.num_parameters(),
        "store_bytes": store.nbytes(),
        "file_bytes": file_bytes,
        "peak_over_store": round(grown / store.nbytes(), 4),
        "beyond_store_bytes": grown - store.nbytes(),
        "seconds_to_read": round(seconds, 2),
        "read_gb_per_s": round(file_bytes / seconds / 1e9, 2),
    }


LOADING = Benchmark(
    """Peak host memory while a Hugging Face folder is read into the host store, over what the store itself holds.

Writes a random Llama-shaped model in bf16 to a temporary folder (2 bytes per parameter) and reads it in a process of
its own. `beyond_store_bytes` is the stricter figure: the whole file would be 2 bytes per parameter. --check asks for
a peak of at most 1.15 times the store.""",
    loading_options,
    loading_memory,
    lambda figures: (
        f"peak {figures['peak_over_store']:.4f} of the store; {figures['read_gb_per_s']} GB/s",
        f"bound: {MOST_PEAK_OVER_STORE} of the store",
    ),
    "--parameters 30e6",
    lambda figures: (
        [f"the peak is {figures['peak_over_store']} of the store"]
        if figures["peak_over_store"] > MOST_PEAK_OVER_STORE
        else []
    ),
)

"""Host memory is counted before it is allocated, and counted right."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchround.run.hardware
from tests.support.random_costs import short_search
from torchround.config import AdamWTable, Config, EngineTable, TrainingTable
from torchround.config.optimizer_tables import MuonTable
from torchround.layer import FileTensor
from torchround.models import FAMILIES, LoraShape, add_adapters, pack_base
from torchround.packed_formats import FORMATS
from torchround.planning import plan_report
from torchround.planning.host_buffers import whole_pages
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS
from torchround.planning.plan_report import longest_tokens, plan_for
from torchround.planning.planner import InfeasiblePlanError
from torchround.run.hardware import Hardware, available_host_bytes
from torchround.run.numbers import run_question
from torchround.trainer import build_store

CPU = Hardware("cpu", 1, 2**30)


def model(tied=False, frozen=False, adapters=False, packed=None):
    llama3 = FAMILIES["llama3"]
    config = llama3.config_from_flavor("debug", tied_embeddings=tied, vocab_size=261)
    built = llama3.build(config)
    if adapters:
        add_adapters(built, llama3.hf_names(config), LoraShape(16, 16.0, 0.0, ("q_proj", "up_proj")))
    if frozen:
        built.layers[1].requires_grad_(False)
    return built if packed is None else pack_base(built, FORMATS[packed])


def budget_of(built, config, mapped=()):
    return run_question(built, config, CPU, mapped).state()


@pytest.mark.parametrize(
    ("shape", "dtype", "update", "rounds"),
    [
        ({}, "bfloat16", "async", 2),
        ({"tied": True}, "float32", "async", 1),
        ({"frozen": True}, "float16", "sync", 2),
        ({"adapters": True}, "bfloat16", "async", 1),
        ({"adapters": True, "tied": True}, "float16", "async", 2),
        *(({"adapters": True, "tied": True, "packed": name}, "bfloat16", "async", 2) for name in FORMATS),
    ],
)
def test_the_budget_is_what_the_host_store_allocates(shape, dtype, update, rounds):
    config = Config.model_construct(
        training=TrainingTable(dtype=dtype), engine=EngineTable(update=update, rounds=rounds)
    )
    question = run_question(model(**shape), config, CPU)
    budget = question.state()
    store = build_store(model(**shape), config, CPU)
    store.allocate_gradients(rounds)
    # Parts of sums land in buffers of the engine's pool, which are whole pages.
    summed = [bundle for bundle in store.trained if bundle.adds_up]
    itemsize = store.dtype.itemsize
    landing = sum(len(bundle.layers) * whole_pages(bundle.numel * itemsize) for bundle in summed)
    assert budget.state_bytes == store.nbytes() + landing
    gradients = [bundle.gradient.nbytes for bundle in store.trained if bundle.gradient is not None]
    assert budget.gradient_bytes == sum(gradients) + landing
    device_weights = [device_weight.nbytes for bundle in store.bundles for device_weight in bundle.device_weights]
    assert budget.weight_bytes == sum(device_weights)
    assert max(question.costs().values("unpacked_bytes")) == store.unpacked_bytes()
    assert bool(store.unpacked_bytes()) is ("packed" in shape)


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_in_its_files_is_no_memory_of_the_host_store(tied):
    config = Config.model_construct()
    built = model(tied=tied, adapters=True)
    base = {name: shape for name, shape in built.stored_shapes().items() if "lora_" not in name}
    mapped = {
        name: (FileTensor(torch.zeros(shape.numel(), dtype=torch.bfloat16), Path("base"), -1, 0),)
        for name, shape in base.items()
    }
    budget = budget_of(built, config, tuple(mapped))
    store = build_store(built, config, CPU, mapped)
    store.allocate_gradients(1)
    assert budget.state_bytes == store.nbytes()
    copied = budget_of(built, config)
    assert budget.mapped_bytes == sum(tensor.memory.nbytes for (tensor,) in mapped.values())
    # Copies of small parameters are padded, files are not.
    padded = sum(2 * 256 * -(-shape.numel() // 256) for shape in base.values())
    assert copied.state_bytes == budget.state_bytes + padded and copied.mapped_bytes == 0
    assert budget.total_bytes == budget.state_bytes


@pytest.mark.parametrize("table", [AdamWTable(), MuonTable()], ids=["adamw", "muon"])
def test_a_compact_state_saves_what_the_store_of_a_run_with_it_lacks(table):
    compact = table.model_copy(update={"state": "compact"})

    def config(settings):
        return Config.model_construct(engine=EngineTable(update="async"), optimizer=settings)

    def store_bytes(settings):
        return build_store(model(), config(settings), CPU).nbytes()

    question = run_question(model(), config(table), CPU)
    [(setting, smaller)] = question.updates.smaller
    saved_bytes = question.state().state_bytes - replace(question, updates=smaller).state().state_bytes
    assert setting == 'optimizer.state = "compact"' and saved_bytes == store_bytes(table) - store_bytes(compact) > 0
    assert not run_question(model(), config(compact), CPU).updates.smaller


@short_search()
def test_each_length_is_tried_with_its_own_batches_of_data(monkeypatch):
    """Sequences of 16 Mi tokens need 1 GiB of batches; the ones that fit, far less."""
    monkeypatch.setattr(plan_report, "LONGEST_LENGTH", 1 << 16)
    config = Config.model_construct(training=TrainingTable(seq_len=2**24, global_batch_size=2))
    scarce = Hardware("cpu", 1, 2**30, host_bytes=budget_of(model(), config).state_bytes + 2**29)
    question = run_question(model(), config, scarce, loader_bytes_for=lambda tokens, batch: 32 * tokens * batch)
    with pytest.raises(InfeasiblePlanError, match="are missing"):
        plan_for(question)
    assert longest_tokens(question) == longest_tokens(replace(question, seq_len=1024)) > 0


def test_a_containers_limit_counts_where_it_is_lower_without_files_that_the_kernel_gives_back(tmp_path, monkeypatch):
    monkeypatch.setattr(torchround.run.hardware, "CGROUP", tmp_path)
    assert available_host_bytes() > 2**20
    for limit, bytes_left in (("max", None), ("50000", 50000 - (20000 - 6000)), ("13000", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("20000\n")
        (tmp_path / "memory.stat").write_text("anon 14000\ninactive_file 4000\nactive_file 2000\n")
        found = available_host_bytes()
        assert found > 2**20 if bytes_left is None else found == bytes_left


@pytest.mark.parametrize(("kind", "rings"), [("cuda", 2), ("cpu", 0)])
def test_the_rings_through_which_files_are_read_count_for_devices_that_lock_pages(kind, rings):
    """The engine takes them from its pool (`tests/engine/worker/test_file_reader.py`)."""
    built, config = model(adapters=True), Config.model_construct()
    machine = Hardware(kind, 2, 2**30)
    names = [f"block.0.{path}" for path, parameter in built.layers[1].named_parameters() if not parameter.requires_grad]
    with_files = run_question(built, config, machine, names).state()
    assert with_files.reader_bytes == rings * READER_BUFFERS * READER_BUFFER_BYTES
    assert run_question(built, config, machine).state().reader_bytes == 0
    state = with_files.weight_bytes + with_files.gradient_bytes + with_files.optimizer_bytes
    assert with_files.state_bytes == state + with_files.reader_bytes

"""Host memory that a step takes, by the tensors that are alive and by the whole process."""

import gc

import psutil
import pytest
import torch
from torch import Tensor

from tests.support.processes import run_program
from torchround.config import Config, EngineTable, TrainingTable
from torchround.config.optimizer_tables import optimizer_tables
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.planning.memory import PROGRAM_BYTES
from torchround.planning.partition import Partition
from torchround.run.hardware import Hardware
from torchround.run.numbers import run_question
from torchround.trainer import build_store

HARDWARE = Hardware("cpu", 1, device_bytes=2**30)
TOKENS, VOCABULARY = 16, 512
# Sizes that need no padding, except in vectors.
SIZES = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_size": 512}


def train(optimizer, state, update, measure):
    table = optimizer_tables()[optimizer].model_validate({"state": state})
    training = TrainingTable(seq_len=TOKENS, global_batch_size=1, micro_batch_size=1)
    config = Config.model_construct(training=training, engine=EngineTable(update=update), optimizer=table)
    model = FAMILIES["llama3"].build(FAMILIES["llama3"].config_from_flavor("debug", **SIZES, vocab_size=VOCABULARY))
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    micro_batch = MicroBatch(tokens, tokens, torch.arange(TOKENS)[None], torch.zeros_like(tokens), max_documents=1)
    before = measure()
    store = build_store(model, config, HARDWARE)
    store.initialize(model, seed=0)
    settings = EngineSettings(clip="layer" if update == "bounded" else "global")
    blocks = (1,) * (len(model.layers) - 1)
    parts = model, store, HARDWARE.make_devices(), Partition(blocks, 1, blocks)
    with Engine(*parts, optimizer=table, settings=settings) as engine:
        engine.forward_backward([micro_batch])
        engine.step(1e-3)
        engine.drain()
    return before, measure(), store, run_question(model, config, HARDWARE).state()


def storages():
    gc.collect()
    tensors = (found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter))
    # Other tests may have left sparse ones, which have no storage.
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided)
    found = (tensor.untyped_storage() for tensor in dense if tensor.device.type == "cpu")
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize(
    ("optimizer", "state", "update"),
    [pytest.param("adamw", "compact", "bounded", marks=pytest.mark.nightly), ("muon", "compact", "sync")],
)
def test_a_step_adds_no_host_memory_to_the_store_which_takes_what_is_planned(optimizer, state, update):
    before, after, store, planned = train(optimizer, state, update, storages)
    held = sum(nbytes for address, nbytes in after.items() if address not in before)
    assert held == pytest.approx(store.nbytes(), rel=0.002)  # and a few numbers of the step
    assert planned.state_bytes == pytest.approx(store.nbytes(), rel=0.002)


def print_resident_bytes():
    train("adamw", "exact", "sync", lambda: None)
    print(psutil.Process().memory_info().rss)


@pytest.mark.nightly
def test_the_program_takes_what_reports_name():
    """The model is so small that the program takes nearly all."""
    done = run_program("-c", "from tests.run.test_host_memory import print_resident_bytes as print_it; print_it()")
    # Versions and builds of PyTorch differ, and what is installed beside it.
    assert PROGRAM_BYTES / 2 < int(done.stdout) < 2 * PROGRAM_BYTES

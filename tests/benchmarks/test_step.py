"""The plain loop that the engine is measured against trains what the engine trains, tied weights too."""

import pytest
import torch

from benchmarks.plain_loops import LR, SameArithmeticLoop, random_step
from torchround.config import AdamWTable, EngineTable, TrainingTable
from torchround.models import FAMILIES
from torchround.pipeline.plan_report import plan_for
from torchround.run.engine_parts import build_engine, build_store
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers, run_question

TRAINING = TrainingTable(seq_len=12, global_batch_size=4, micro_batch_size=2, dtype="float32")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_engine_and_plain_loop_reach_the_same_losses(tied):
    family, engine_table, optimizer = FAMILIES["llama3"], EngineTable(devices="cpu"), AdamWTable()
    config = family.config_from_flavor("debug", vocab_size=50, num_layers=2, tied_embeddings=tied)
    model, hardware = family.build(config), find_hardware(engine_table)
    numbers = RunNumbers(TRAINING, engine_table)
    store = build_store(model, numbers, hardware)
    store.initialize(model, seed=0)
    plain = SameArithmeticLoop(family.build(config), store, optimizer)
    plan = plan_for(run_question(model, numbers, hardware))
    generator = torch.Generator().manual_seed(0)
    with build_engine(model, store, hardware.make_devices(), plan, numbers, optimizer) as engine:
        for _ in range(3):
            step = random_step(TRAINING, 50, generator)
            result = engine.forward_backward(step)
            engine.step(LR)
            # A tied gradient is added up in another order; a weight that came apart would be off by more.
            assert result.loss() == pytest.approx(plain.step(step), rel=1e-6)
        engine.drain()

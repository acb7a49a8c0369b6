"""The plain loop that the engine is measured against trains what the engine trains, tied weights too."""

import pytest
import torch

from benchmarks.plain_loops import LR, MAX_NORM, SameArithmeticLoop, random_step
from torchround.config import EngineTable, OptimizerTable, TrainingTable
from torchround.engine.build import build_engine, build_store, choose_devices, plan_run
from torchround.models import FAMILIES

TRAINING = TrainingTable(seq_len=12, global_batch_size=4, micro_batch_size=2, dtype="float32")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_engine_and_plain_loop_reach_the_same_losses(tied):
    family, engine_table, optimizer = FAMILIES["llama3"], EngineTable(devices="cpu"), OptimizerTable()
    config = family.config_from_flavor("debug", vocab_size=50, num_layers=2, tied_embeddings=tied)
    model, devices = family.build(config), choose_devices(engine_table)
    store = build_store(model, TRAINING, engine_table, devices)
    store.initialize(model, seed=0)
    plain = SameArithmeticLoop(family.build(config), store, optimizer)
    plan = plan_run(model, TRAINING, engine_table, devices)
    generator = torch.Generator().manual_seed(0)
    with build_engine(model, store, devices.make(), plan, engine_table, optimizer, MAX_NORM) as engine:
        for _ in range(3):
            step = random_step(TRAINING, 50, generator)
            result = engine.forward_backward(step)
            engine.step(LR)
            # A tied gradient is added up in another order; a weight that came apart would be off by more.
            assert result.loss() == pytest.approx(plain.step(step), rel=1e-6)
        engine.drain()

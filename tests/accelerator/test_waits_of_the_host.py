"""No operation of a step makes the host wait for a device, and no copy is from or to memory that is not page-locked."""

from dataclasses import replace

import pytest
import torch

from tests.support.device_toy import device_engine
from tests.support.scheduled_run import ShortRun
from tests.support.small_decoders import write_base
from tests.support.toy import BLOCKS, PARTITIONS, toy_batches, toy_store, train
from torchround.layer import KEEPABLE
from torchround.models.common import feed_forward
from torchround.planning.update_modes import ASYNC

RUNS = {
    "toy, bfloat16": ShortRun(dtype=torch.bfloat16, rounds=2, tied=True),
    "toy, async": ShortRun(mode=ASYNC),
    "llama3": ShortRun(model="llama3-debug", dtype=torch.bfloat16),
    "qwen3": ShortRun(model="qwen3-debug", dtype=torch.bfloat16),
    "qwen3, experts": ShortRun(model="qwen3-debug_moe", dtype=torch.bfloat16),
    "gpt_oss": ShortRun(model="gpt_oss-debug", dtype=torch.bfloat16),
    "qwen3, packed experts": ShortRun(model="qwen3-packed", dtype=torch.bfloat16),
}
EVERYTHING = ((), *(KEEPABLE,) * BLOCKS, ())
for _name in ("toy, async", "qwen3, experts", "gpt_oss", "qwen3, packed experts"):
    RUNS[f"{_name}, kept"] = replace(RUNS[_name], settings=(("kept", EVERYTHING),))


@pytest.mark.parametrize("name", RUNS)
def test_no_step_waits_for_a_device_by_an_operation_or_by_a_pageable_copy(simulator, name, monkeypatch):
    run, waits, make_routes = RUNS[name], [], feed_forward.make_routes

    def noted(*routed):
        waits.append(routed)
        return make_routes(*routed)

    model = run.build()
    store = toy_store(model, run.dtype, mode=run.mode, pinned=True)
    if model.packed:
        # Without Triton each run of a block with packed experts waits for the ends of its rows, and no backward does.
        monkeypatch.setattr(feed_forward, "make_routes", noted)
        write_base(store)
    settings = {"rounds": run.rounds, **dict(run.settings)}
    with device_engine("simulated", model, store, PARTITIONS["forward coarser"], 2, **settings) as engine:
        train(engine, toy_batches(2, run.micro_batches))
        evaluation = engine.evaluate(toy_batches(1, 2)[0])
        assert evaluation.loss() > 0
    assert simulator.synchronous_operations() == ({"blocking copy to host": len(waits)} if waits else {})
    assert simulator.pageable_copies() == 0 == simulator.copies_from_unlocked_memory()
    store.close()

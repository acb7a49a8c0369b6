"""The default run on a small card: measured steps, a new plan, and never more memory than was planned.

The real command trains a model that is many times larger than the card, as a 4B model is on 24 GB.
"""

import gc
import json
from dataclasses import replace

import pytest
import torch

import torchround.trainer
from tests.support.small_run import small_runs, use_family
from torchround.engine.engine import Engine
from torchround.models import FAMILIES
from torchround.planning.memory import MIB

__all__ = ["small_runs"]

# The card has this much free memory. The model's state takes several times that on the host.
CARD_BYTES = 8 * MIB
# A plan counts what is kept, not the temporaries of single operations. Short sequences keep them small beside the weights, as
# they are on a card.
MARGIN = 1.05
STEPS = 9
KEYS = (
    *("--model.family=wide", "--model.flavor=untied", f"--training.steps={STEPS}", "--training.seq_len=16"),
    *(
        "--training.global_batch_size=4",
        "--training.micro_batch_size=1",
        "--engine.num_devices=2",
        "--training.dtype=bfloat16",
    ),
    *("--engine.plan=none", "--engine.devices=simulated"),
)


class Record:
    def __init__(self, planned_bytes):
        self.planned_bytes = planned_bytes
        self.peaks, self.left, self.allocations = [], [], []


@pytest.fixture
def small_card(simulator):
    for device in range(simulator.DEVICES):
        simulator.set_memory_limit(device, CARD_BYTES)
    gc.collect()
    yield simulator


@pytest.fixture
def records(monkeypatch, small_card):
    made, build, close, step = [], torchround.trainer.build_engine, Engine.close, Engine.step
    devices = range(2)

    def statistics(name):
        return [small_card.memory_statistics(device)[name] for device in devices]

    def building(model, store, on, plan, *arguments, **keywords):
        assert statistics("allocated_bytes") == [0, 0], "the engine before has given everything back"
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        made.append(Record(plan.device_bytes))
        return build(model, store, on, plan, *arguments, **keywords)

    def allocations(engine):
        own = [device.num_allocations for device in engine.devices]
        return own, statistics("system_allocations"), engine.pool.num_allocations

    def stepping(engine, lr):
        step(engine, lr)
        made[-1].allocations.append(allocations(engine))

    def closing(engine):
        engine.drain()
        made[-1].allocations.append(allocations(engine))
        close(engine)
        if not made[-1].peaks:
            made[-1].peaks = statistics("peak_allocated_bytes")
            made[-1].left = statistics("allocated_bytes")

    monkeypatch.setattr(torchround.trainer, "build_engine", building)
    monkeypatch.setattr(Engine, "step", stepping)
    monkeypatch.setattr(Engine, "close", closing)
    return made


def wide_family():
    """A Llama 3 family whose state is several times as large as the card."""
    family = FAMILIES["llama3"]
    untied = family.config_from_flavor(
        "debug", num_layers=6, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=512
    )
    return replace(family, flavors={"untied": untied})


@pytest.mark.parametrize("update", ["sync", "async"])
def test_memory_stays_within_the_plan_and_comes_back(small_runs, monkeypatch, small_card, records, update):
    use_family(monkeypatch, "wide", wide_family())
    keys = [*KEYS, f"--engine.update={update}"]
    gc.disable()  # memory comes back without the collector
    try:
        assert small_runs("run", *keys) == 0
        allocated = [small_card.memory_statistics(device)["allocated_bytes"] for device in range(2)]
        locked_bytes = small_card.page_locked_bytes()
    finally:
        gc.enable()
    assert len(records) == 2, "one engine measures, one trains under the settled plan"
    for record in records:
        assert record.left == [0, 0] and max(record.peaks) > 0
        assert max(record.peaks) <= MARGIN * record.planned_bytes <= MARGIN * CARD_BYTES, (
            f"{max(record.peaks) / MIB:.2f} of {record.planned_bytes / MIB:.2f} MiB"
        )
    # At most two steps are under way: when the fourth one is dispatched, the second one has ended.
    settled = records[1].allocations
    assert len(settled) > STEPS - 3 and all(later == settled[3] for later in settled[4:])
    assert allocated == [0, 0] and locked_bytes == 0
    losses = [json.loads(line)["loss"] for line in (small_runs.path("run") / "metrics.jsonl").open()]
    assert losses[-1] < losses[0]

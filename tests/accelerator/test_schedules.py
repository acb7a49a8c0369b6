"""Whatever a device runs first, losses and weights are a plain loop's bit for bit, and nothing hangs.

Each seed draws a run and an adversarial schedule for it: which streams hurry, which are starved, and when that changes.
A seed that fails fails again: `python -m pytest tests/accelerator/test_schedules.py -k "seed-17"`.
"""

import functools
import random
from dataclasses import replace

import pytest
import torch

from tests.support.optimizers import OPTIMIZERS
from tests.support.scheduled_run import Schedule, ShortRun, execute, reference, scheduled
from tests.support.toy import BLOCKS, PARTITIONS
from torchround.layer import KEEPABLE
from torchround.planning.update_modes import ASYNC, BOUNDED

SEEDS, ALL_SEEDS = 50, 500
MODELS = ("llama3-debug", "qwen3-debug", "qwen3-debug_moe", "gpt_oss-debug", "llama3-packed", "qwen3-packed")
WORKERS = ((1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (4, 4))


def draw(seed):
    """Draw a run. One in five is of a family; models and arithmetic are few, so that references are shared."""
    drawn = random.Random(seed)
    arithmetic = drawn.choice(
        [
            {},
            {"tied": True, "dtype": torch.bfloat16},
            {"mode": ASYNC},
            {"mode": ASYNC, "tied": True, "rounds": 2, "evaluates": True},
            {"rounds": 2, "dtype": torch.bfloat16, "evaluates": True},
        ]
    )
    run = ShortRun(**arithmetic)
    if seed % 5 == 4:
        run = ShortRun(model=drawn.choice(MODELS), dtype=torch.bfloat16, micro_batches=2)
    if seed % 5 == 3:
        more = drawn.choice([{"tied": True}, {"dtype": torch.bfloat16}, {"evaluates": True}])
        run = ShortRun(mode=BOUNDED, steps=3, stale_layers=drawn.choice((0, 2, 5)), **more)
    if run.mode is not BOUNDED:
        # Half of them with AdamW in fp32, whose reference is another loop.
        optimizers = ["adamw"] * len(OPTIMIZERS) + list(OPTIMIZERS)
        run = replace(run, optimizer=random.Random(f"optimizer of {seed}").choice(optimizers))
    workers, devices = drawn.choice(WORKERS)
    settings = {
        "experts_by_need": seed % 2 == 0,
        "layerwise_recompute": drawn.random() < 0.25,
        # A layer whose forward read older weights must be computed anew.
        "kept": tuple(
            () if layer < run.stale_layers else names
            for layer, names in enumerate(kept_by(run.model, random.Random(-seed)))
        ),
    }
    return replace(
        run,
        # Stale layers come before the fused stage, which is all there is in the first partition.
        partition=drawn.choice(list(PARTITIONS)[run.mode is BOUNDED :]),
        workers=workers,
        devices=devices,
        tight_pool=drawn.random() < 0.5,
        settings=tuple(settings.items()),
    )


def kept_by(model, drawn):
    if drawn.random() < 0.5:
        return ()
    names = ("gate_up", "down") if model == "toy" else KEEPABLE
    blocks = [tuple(name for name in names if drawn.random() < 0.6) for _ in range(BLOCKS)]
    return ((), *blocks, ())


@functools.cache
def expected(arithmetic):
    return reference(arithmetic)


def assert_exact(simulator, seed):
    run = draw(seed)
    simulator.run_freely(0)
    same = {"partition": "one stage", "workers": 1, "devices": 1, "tight_pool": False, "settings": ()}
    wanted = expected(replace(run, **same))
    with scheduled(simulator, Schedule(allocating=None, seed=seed)) as make:
        outcome = execute(run, make)
    assert outcome.equals(wanted), f"seed {seed}: {run}: {outcome} is not {wanted}"
    assert simulator.fallbacks() == 0, "a thread waited that the scheduler did not know of"


@pytest.mark.parametrize("seed", range(SEEDS), ids="seed-{}".format)
def test_any_schedule_gives_the_bits_of_a_plain_loop(simulator, seed):
    assert_exact(simulator, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS, ALL_SEEDS), ids="seed-{}".format)
def test_any_other_schedule_gives_the_bits_of_a_plain_loop_too(simulator, seed):
    assert_exact(simulator, seed)

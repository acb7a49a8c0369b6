"""Two slots in one buffer: the space that consecutive stages take is what the planner counts."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.support import toy
from tests.support.toy import BLOCKS, PARTITIONS, VOCABULARY, WIDTH, toy_batches, train
from torchround.config import Config, TrainingTable
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.planning.memory import device_memory
from torchround.planning.partition import Partition
from torchround.planning.plan_report import plan_for
from torchround.run.hardware import Hardware
from torchround.run.numbers import run_question
from torchround.trainer import build_engine, build_store


def numel_of(partition):
    """Return the elements of each stage's weights, and of its gradients, without the alignment of parameters."""
    block = WIDTH + 3 * WIDTH * WIDTH + 3 * WIDTH + 3 * WIDTH * WIDTH
    layers = [VOCABULARY * WIDTH, *[block] * BLOCKS, WIDTH + VOCABULARY * WIDTH]
    weights = [sum(layers[stage.start : stage.stop]) for stage in partition.stages()]
    return weights, weights[len(partition.forward) :]


@pytest.mark.parametrize("partition", ["one layer a stage", "backward coarser"])
def test_one_device_holds_the_two_largest_consecutive_stages_and_no_more(partition):
    with toy.toy_engine(PARTITIONS[partition], 1) as engine:
        # Nothing but the slots: the rest is allocated when the first pass is known.
        allocated = engine.devices[0].peak_bytes()
        engine.evaluate(toy_batches(1, 2)[0])
        train(engine, toy_batches(2, 2))
        engine.evaluate(toy_batches(1, 2)[0])
        train(engine, toy_batches(1, 2))
    weights, gradients = numel_of(PARTITIONS[partition])
    in_a_row = [*pairwise([*weights, weights[0]]), (weights[len(PARTITIONS[partition].forward)], weights[0])]
    with_gradients = pairwise([*gradients, gradients[0]])
    expected = 4 * (max(map(sum, in_a_row)) + max(map(sum, with_gradients)))
    # Parameters begin at aligned elements, and each slot at an aligned byte.
    assert expected <= allocated <= expected + 4 * 4 * 64 * 4 * (BLOCKS + 2)


@pytest.mark.parametrize(
    ("num_devices", "dtype"), [(1, "bfloat16"), (2, "float32"), pytest.param(3, "bfloat16", marks=pytest.mark.nightly)]
)
def test_the_buffers_of_a_real_run_are_what_its_plan_counts(num_devices, dtype):
    family = FAMILIES["qwen3"]
    model = family.build(family.config_from_flavor("debug"))
    training = TrainingTable(seq_len=64, global_batch_size=4, micro_batch_size=1, dtype=dtype)
    config = Config.model_construct(training=training, optimizer=toy.OPTIMIZER)
    hardware = Hardware("cpu", num_devices, 2**30)
    question = run_question(model, config, hardware)
    layers = len(model.layers)
    plan = plan_for(question)
    if plan.partition.num_stages == 1:
        plan = plan_for(replace(question, given=(Partition((layers - 1,), 1, (1, layers - 2)), 1)))
    store = build_store(model, config, hardware)
    store.initialize(model, 0)
    devices = hardware.make_devices()
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    batch = [MicroBatch(tokens, tokens, torch.arange(64)[None], tokens)] * 4
    with build_engine(model, store, devices, plan, config) as engine:
        for _ in range(2):
            engine.forward_backward(batch)
            engine.step(1e-3)
        engine.evaluate(batch)
    counted = device_memory(plan.partition, question.costs(), num_devices, 4, 1, question.limits())
    # A virtual device counts the engine's own buffers; activations of layers are PyTorch's.
    buffers = counted.total_bytes - counted.compute_bytes
    assert [device.peak_bytes() for device in devices] == pytest.approx([buffers] * num_devices, rel=0.01)

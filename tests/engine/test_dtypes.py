"""The effect of `training.dtype` and `engine.accumulate_dtype` on a run built from tables."""

import pytest
import torch

from tests.support.toy import PARTITIONS, toy_batches, toy_model, train
from torchround.config import Config, EngineTable, TrainingTable
from torchround.planning.plan import Plan
from torchround.run.hardware import find_hardware
from torchround.trainer import build_engine, build_store

PLAN = Plan(PARTITIONS["forward coarser"], 1, 2, 4, "sync", 1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "keys", "gradients", "fits"),
    [
        ("float32", {}, "float32", False),
        ("bfloat16", {}, "bfloat16", True),
        ("float16", {}, "float16", False),
        ("float32", {"accumulate_dtype": "bfloat16"}, "float32", True),
    ],
    ids=str,
)
def test_weights_and_gradients_have_the_dtypes_of_the_tables(dtype, keys, gradients, fits):
    """The digits of gradients tell whether they were added up in bfloat16: each of them `fits` into it then."""
    model, table = toy_model(), EngineTable(devices="cpu", num_devices=2, **keys)
    hardware, config = find_hardware(table), Config.model_construct(training=TrainingTable(dtype=dtype), engine=table)
    store = build_store(model, config, hardware)
    store.initialize(model, seed=0)
    with build_engine(model, store, hardware.make_devices(), PLAN, config) as engine:
        train(engine, toy_batches(2, micro_batches=4))
    assert store.applied_updates == 2
    found = torch.cat([bundle.gradient for bundle in store.trained])
    assert found.dtype == getattr(torch, gradients)
    assert torch.equal(found.bfloat16().to(found.dtype), found) is fits
    for bundle in store.trained:
        assert bundle.device_weights[0].dtype == getattr(torch, dtype)
        moments = {flat.dtype for segment in bundle.segments for flat in segment.parts.values()}
        assert moments == {bundle.values(bundle.parameters[0], store.step).dtype} == {torch.float32}

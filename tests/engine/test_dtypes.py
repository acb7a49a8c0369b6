"""The effect of `training.dtype`, `engine.grad_dtype` and `engine.accumulate_dtype` on a run built from tables."""

import pytest
import torch

from tests.support.rounding import BF16, assert_close_in_sums
from tests.support.toy import PARTITIONS, toy_batches, toy_model, train
from torchround.config import AdamWTable, EngineTable, TrainingTable
from torchround.optim.split_weights import split
from torchround.pipeline.plan import Plan
from torchround.run.engine_parts import build_engine, build_store
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers

BATCHES = toy_batches(2, micro_batches=4)
PLAN = Plan(PARTITIONS["forward coarser"], 1, 2, 4, "sync", 1.0, 0.0, 1.0)


def trained_store(dtype, **engine_keys):
    """The host store after two steps of a run built from tables."""
    model = toy_model()
    table = EngineTable(devices="cpu", num_devices=2, **engine_keys)
    hardware, numbers = find_hardware(table), RunNumbers(TrainingTable(dtype=dtype), table)
    store = build_store(model, numbers, hardware)
    store.initialize(model, seed=0)
    with build_engine(model, store, hardware.make_devices(), PLAN, numbers, AdamWTable()) as engine:
        train(engine, BATCHES)
    assert store.applied_updates == 2
    return store


def gradients(store):
    return [bundle.gradient for bundle in store.trained]


def share_representable(tensors, dtype):
    """Share of the elements that `dtype` can hold as they are."""
    exact = [tensor.to(dtype).to(tensor.dtype).eq(tensor) for tensor in tensors]
    return torch.cat([part.flatten() for part in exact]).float().mean().item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_device_weights_and_gradients_have_the_training_dtype_and_state_is_float32(dtype):
    store = trained_store(dtype)
    for bundle in store.trained:
        assert {bundle.device_weights[0].dtype, bundle.gradient.dtype} == {getattr(torch, dtype)}
        weights = bundle.copy_weights(store.step)
        moments = {flat.dtype for segment in bundle.segments for flat in segment.parts.values()}
        assert {weights.dtype} | moments == {torch.float32}
        assert (bundle.weight is None) == (dtype == "bfloat16")
        expected = split(weights)[0] if bundle.weight is None else weights.to(bundle.device_weights[0].dtype)
        assert torch.equal(bundle.device_weights[0], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grad_dtype_float32_brings_down_what_16_bits_cannot_hold(dtype):
    kept = gradients(trained_store(dtype, grad_dtype="float32"))
    assert all(gradient.dtype == torch.float32 for gradient in kept)
    assert share_representable(kept, getattr(torch, dtype)) < 0.5


def test_grad_dtype_below_the_training_dtype_rounds_on_the_way_down():
    rounded = gradients(trained_store("float32", grad_dtype="bfloat16"))
    exact = gradients(trained_store("float32"))
    assert all(gradient.dtype == torch.bfloat16 for gradient in rounded)
    # These are gradients of the second step, whose weights already differ by the first one's rounding: two
    # roundings to bf16, and room for what the network makes of the first.
    for ours, theirs in zip(rounded, exact, strict=True):
        assert_close_in_sums(ours.float(), theirs, 4, unit=BF16)


def test_accumulate_dtype_is_the_format_in_which_micro_batches_add_up():
    """Gradients come down in float32, so their digits show in which format they were added up."""
    wide = gradients(trained_store("bfloat16", grad_dtype="float32"))
    narrow = gradients(trained_store("bfloat16", grad_dtype="float32", accumulate_dtype="bfloat16"))
    assert share_representable(wide, torch.bfloat16) < 0.5
    assert share_representable(narrow, torch.bfloat16) == 1.0

"""A run finds the accelerators of its machine, and plans with the memory that it could use there."""

import gc

import pytest
import torch

from tests.support.small_run import STEPS, small_runs
from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.accelerators import kind_of, present_kind
from torchround.config import EngineTable
from torchround.engine.device import AcceleratorDevice
from torchround.planning.memory import MIB
from torchround.run.hardware import USABLE_DEVICE_FRACTION, find_hardware

__all__ = ["small_runs"]


def test_the_accelerator_of_the_machine_is_found_by_its_kind_and_by_default(kind):
    assert present_kind() is kind_of(kind)
    # Both given: free memory changes between two looks at it.
    table = EngineTable(device_memory_gib=1.0, host_memory_gib=1.0)
    found = find_hardware(table)
    assert found == find_hardware(table.model_copy(update={"devices": kind}))
    assert (found.kind, found.num_devices) == (kind, torch.accelerator.device_count())
    assert {device.torch_device.type for device in found.make_devices()} == {kind}


def test_what_other_processes_hold_is_not_planned(simulator):
    for device in range(simulator.DEVICES):
        simulator.set_memory_limit(device, 64 * MIB)
    before = find_hardware(EngineTable()).device_bytes
    assert before == int(USABLE_DEVICE_FRACTION * 64 * MIB)
    simulator.occupy(1, 24 * MIB)
    assert find_hardware(EngineTable()).device_bytes == int(USABLE_DEVICE_FRACTION * 40 * MIB)


def test_what_this_process_gave_back_is_planned_again_and_what_it_holds_is_not(simulator):
    for device in range(simulator.DEVICES):
        simulator.set_memory_limit(device, 64 * MIB)
    before = find_hardware(EngineTable())
    held = AcceleratorDevice(f"{before.kind}:0").allocate(16 * MIB)
    assert find_hardware(EngineTable()).device_bytes == int(USABLE_DEVICE_FRACTION * 48 * MIB)
    del held
    gc.collect()
    torch.accelerator.synchronize()
    assert simulator.memory_statistics(0)["reserved_bytes"] >= 16 * MIB, "PyTorch has it in its cache"
    assert find_hardware(EngineTable()).device_bytes == before.device_bytes


def test_a_run_on_accelerators_has_the_losses_of_one_on_the_cpu(kind, small_runs):
    keys = ("--engine.plan=none", "--engine.measure_steps=2", "--engine.num_devices=2")
    for name in (kind, "cpu"):
        assert small_runs(name, f"--engine.devices={name}", *keys) == 0
    found, expected = small_runs.losses(kind), small_runs.losses("cpu")
    assert list(found) == list(expected) and len(found) == STEPS
    for step, figures in expected.items():
        # Kernels of a card round differently in each of the five steps.
        assert found[step] == pytest.approx(figures, rel=1e-4), step


def test_an_engine_gives_its_memory_back_to_the_driver(simulator, kind):
    """The next engine has slots of other sizes, which cached blocks would not fit."""
    torch.accelerator.empty_cache()
    before = [simulator.memory_statistics(device)["reserved_bytes"] for device in range(2)]
    store = toy_store(toy_model(), pinned=True)
    devices = iter([AcceleratorDevice(f"{kind}:{index}") for index in range(2)])
    with toy_engine(PARTITIONS["one layer a stage"], 2, store=store, wrap=lambda _: next(devices)) as engine:
        train(engine, toy_batches(2, micro_batches=4))
        during = [simulator.memory_statistics(device)["reserved_bytes"] for device in range(2)]
    assert min(during) > 0
    assert [simulator.memory_statistics(device)["reserved_bytes"] for device in range(2)] == before

"""The dry run and the run agree: random settings take the memory that is counted, and with one byte less are refused.

The allocators' own counters are compared: the host store, the pool of host buffers, and the buffers of each device.
Activations of virtual devices belong to PyTorch's allocator on the host, which counts nothing; those are as planned.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.support.machines import run_machines
from torchround.config import AdamWTable, Config, EngineTable, TrainingTable, ValidationTable
from torchround.config.optimizer_tables import MuonTable
from torchround.data import cut
from torchround.engine.store.bundles import Ownership
from torchround.layer import MicroBatch
from torchround.models import FAMILIES, LoraShape, add_adapters
from torchround.planning.machine_shares import step_share
from torchround.planning.memory import MIB
from torchround.planning.plan_report import fits, host_memory, plan_for, report_plan
from torchround.planning.planner import InfeasiblePlanError
from torchround.planning.run_question import PlannedMachines
from torchround.run.hardware import Hardware
from torchround.run.numbers import run_question
from torchround.trainer import build_engine, build_store


class RandomSetting:
    def __init__(self, seed, is_bounded=False):
        draw = random.Random(seed)
        self.family = draw.choice(["llama3", "qwen3", "gpt_oss"])
        self.fields = {"num_layers": draw.randint(1, 3)}
        if self.family != "gpt_oss":
            self.fields["tied_embeddings"] = draw.choice([True, False])
        self.adapters = draw.choice([False, False, True])
        batch = draw.randint(2, 9)
        micro_batch = draw.randint(1, min(4, batch))
        dtype = draw.choice(["float32", "bfloat16"])
        self.training = TrainingTable(
            seq_len=draw.choice([32, 40, 128]), global_batch_size=batch, micro_batch_size=micro_batch, dtype=dtype
        )
        self.engine = EngineTable(
            update=draw.choice(["sync", "async"]),
            rounds=draw.choice([None, None, min(2, -(-batch // micro_batch)), "auto"]),
            recompute=draw.choice(["stage", "layer"]),
            accumulate_dtype=draw.choice(["float32", "bfloat16"]),
            compile=False,
        )
        if is_bounded:
            changes = {"update": "bounded", "rounds": None, "stale_layers": draw.choice(["auto", 0, 1, 2])}
            self.engine = self.engine.model_copy(update=changes)
            self.training = self.training.model_copy(update={"clip": "layer"})
        self.devices = draw.randint(1, 4)
        self.device_bytes = draw.randint(12, 40) * MIB
        self.validates = draw.choice([True, False])
        # Half of the settings keep activations.
        kept = draw.choice(["none", "none", "none", "attention", "half", "all", ("qkv", "down")])
        if kept == "half" and self.fields["num_layers"] == 1:
            kept = "all"  # of one block, every other one is none
        self.engine = self.engine.model_copy(update={"keep_activations": kept})
        self.engine = self.engine.model_copy(
            update={"delay_correction": draw.choice(["auto", "none"]) if self.engine.update == "async" else "auto"}
        )
        table = AdamWTable if is_bounded else draw.choice([AdamWTable, MuonTable])
        self.optimizer = table(state=draw.choice(["exact", "compact"]))

    def model(self):
        family = FAMILIES[self.family]
        config = family.config_from_flavor("debug", **self.fields)
        built = family.build(config)
        if self.adapters:
            add_adapters(built, family.hf_names(config), LoraShape(4, 8.0, 0.0, ("q_proj", "v_proj")))
        return built

    def config(self):
        validation = ValidationTable(interval_steps=int(self.validates))
        tables = {"training": self.training, "engine": self.engine, "optimizer": self.optimizer}
        return Config.model_construct(**tables, validation=validation)

    def question(self, host_bytes=None):
        hardware = Hardware("cpu", self.devices, self.device_bytes, host_bytes)
        return run_question(self.model(), self.config(), hardware)

    def least_plan(self):
        """With a byte of host memory less there is no plan."""
        plan = plan_for(self.question())
        while True:
            needed = host_memory(self.question(), plan).total_bytes
            try:
                plan = plan_for(self.question(needed - 1))
            except InfeasiblePlanError:
                assert report_plan(self.question(needed - 1)).plan is None
                assert not fits(self.question(needed - 1))
                return plan

    def batch(self, seed):
        training = self.training
        shape = (training.global_batch_size, training.seq_len)
        tokens = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(training.seq_len).expand(shape).contiguous()
        return MicroBatch(tokens, tokens.roll(-1, 1), positions, torch.zeros_like(tokens))

    def measured_bytes(self, plan, group=None):
        rank, size = (group.rank, group.size) if group else (0, 1)
        model, hardware = self.model(), Hardware("cpu", self.devices, self.device_bytes)
        store = build_store(model, self.config(), hardware, ownership=Ownership(rank, size) if group else None)
        store.initialize(model, 0)
        devices = hardware.make_devices()
        with build_engine(model, store, devices, plan, self.config(), machines=group) as engine:
            for seed in range(3):
                parts = cut(self.batch(seed), self.training.micro_batch_size)
                share = step_share(len(parts), plan.rounds, rank, size)
                own = [parts[index] for index in share.micro_batches]
                engine.forward_backward(own, share, sum(part.num_labels() for part in parts))
                engine.step(1e-3)
                share = step_share(len(parts), 1, rank, size)
                for _ in range(2 * (self.validates and seed == 1 and bool(share.micro_batches))):
                    assert engine.evaluate([parts[index] for index in share.micro_batches]).loss() > 0
            engine.drain()
            assert engine.pool.allocated_bytes == engine.pool.reserved_bytes, "a buffer was taken in a step"
            peaks = [device.peak_bytes() for device in devices]
            assert max(peaks) <= self.device_bytes
            return store.nbytes() + engine.pool.allocated_bytes + sum(peaks) + self.most_activations(plan)

    def most_activations(self, plan):
        """Return the counted bytes of all devices together while they compute, which allocators do not count."""
        scratch = max(layer.job_scratch_bytes for layer in self.question().costs().layers)
        return max(scratch, *(stage.compute_bytes for stage in plan.stages)) * self.devices


def seeds(seeds, num_by_default):
    return [pytest.param(s, marks=[] if n < num_by_default else pytest.mark.nightly) for n, s in enumerate(seeds)]


def assert_takes_what_is_counted(setting):
    least, fastest = setting.least_plan(), plan_for(setting.question())
    for plan in dict.fromkeys([least, fastest]):
        counted = host_memory(setting.question(), plan).total_bytes
        assert fits(setting.question(counted))
        assert setting.measured_bytes(plan) == counted


@pytest.mark.parametrize("seed", seeds([5, 0, *range(1, 5), *range(6, 30)], 2))
def test_a_run_takes_what_is_counted_and_with_a_byte_less_it_is_refused(seed):
    assert_takes_what_is_counted(RandomSetting(seed))


@pytest.mark.parametrize("seed", seeds(range(100, 116), 2))
def test_a_run_of_bounded_updates_takes_what_is_counted(seed):
    """Inputs of stale layers wait on the host, and layers inside a backward stage have buffers for them on a device."""
    assert_takes_what_is_counted(RandomSetting(seed, is_bounded=True))


@pytest.mark.parametrize("seed", seeds(range(8), 1))
def test_a_device_takes_what_is_counted_and_with_a_byte_less_the_run_is_refused(seed):
    setting = RandomSetting(seed)
    plan = plan_for(setting.question())
    while True:
        smaller = replace(setting.question(), device_bytes=plan.device_bytes - 1)
        try:
            plan = plan_for(smaller)
        except InfeasiblePlanError as error:
            assert "engine.device_memory_gib" in str(error) and not fits(smaller)
            break
    setting.device_bytes = plan.device_bytes
    assert setting.measured_bytes(plan) == host_memory(setting.question(), plan).total_bytes


class MachineSetting(RandomSetting):
    def __init__(self, seed):
        super().__init__(seed)
        draw = random.Random(seed)
        self.num_machines = draw.randint(2, 3)
        rounds = draw.choice([1, 1, 2])
        batch = draw.randint(3, 9)
        # With several rounds a validation shares uneven batches in another way than a step does.
        batch = batch if rounds == 1 else 2 * self.num_machines * self.training.micro_batch_size
        self.training = self.training.model_copy(update={"global_batch_size": batch})
        self.engine = self.engine.model_copy(update={"rounds": rounds})

    def question(self, host_bytes=None):
        return replace(super().question(host_bytes), machines=PlannedMachines(self.num_machines))


@pytest.mark.parametrize("seed", seeds([1, 0, *range(2, 12)], 1))
def test_the_fullest_machine_takes_what_is_counted(seed):
    """Machines are threads here, with real gloo."""
    setting = MachineSetting(seed)
    plan = plan_for(setting.question())
    counted = host_memory(setting.question(), plan)
    taken = run_machines(setting.num_machines, lambda group: setting.measured_bytes(plan, group))
    # The links' staging memory is beside what the allocators count.
    assert max(taken) <= counted.total_bytes - counted.exchange_bytes
    assert max(taken) >= 0.99 * (counted.total_bytes - counted.exchange_bytes)

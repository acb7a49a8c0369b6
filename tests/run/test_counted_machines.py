"""Each of several machines takes the host memory that its plan counts: machines are threads here, with real gloo."""

import random
from dataclasses import replace

import pytest

from tests.run.test_counted_memory import RandomSetting, seeds
from tests.support.machines import run_machines
from torchround.pipeline.plan_report import host_memory, plan_for
from torchround.pipeline.run_question import PlannedMachines
from torchround.run.numbers import RunNumbers


class MachineSetting(RandomSetting):
    """A random setting on several machines."""

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
        self.numbers = RunNumbers(self.training, self.engine, optimizer=self.optimizer)

    def question(self, host_bytes=None):
        return replace(super().question(host_bytes), machines=PlannedMachines(self.num_machines))


@pytest.mark.parametrize("seed", seeds([1, 0, *range(2, 12)], 2))
def test_the_fullest_machine_takes_what_is_counted(seed):
    setting = MachineSetting(seed)
    plan = plan_for(setting.question())
    counted = host_memory(setting.question(), plan)
    taken = run_machines(setting.num_machines, lambda group: setting.measured_bytes(plan, group))
    # The links' staging memory is beside what the allocators count.
    assert max(taken) <= counted.total_bytes - counted.exchange_bytes
    assert max(taken) >= 0.99 * (counted.total_bytes - counted.exchange_bytes)

"""Small runs on several machines: the real command on a tiny model, each machine a process that joins the others."""

import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import train
from tests.support.machines import JOIN_S, start_machines
from tests.support.processes import start_program
from tests.support.scenarios import use_small_family, warm_up
from tests.support.small_run import SmallRuns

__all__ = ["warm_up"]  # called before the first child

# 13 micro-batches in 12 rounds: uneven rounds, and machines with unlike shares.
SHARED = [
    *("--machines.share_host=true", "--engine.plan=none", "--engine.num_devices=1", "--engine.measure_steps=0"),
    *("--training.global_batch_size=13", "--training.micro_batch_size=1"),
]
ALL_ROUNDS = 12


def small_main(arguments):
    use_small_family()
    torch.set_num_threads(1)
    return train.main(arguments)


class SmallMachines(SmallRuns):
    compared = (*SmallRuns.compared, "validation_loss")

    def __init__(self, starter, folder):
        super().__init__(folder, lines=400)
        self.starter = starter

    def start(self, name, num_machines, *overrides):
        rounds = ALL_ROUNDS // num_machines
        arguments = ["--config", "small.toml", f"--run.name={name}", *SHARED, f"--engine.rounds={rounds}"]
        return self.starter.start(
            num_machines, "tests.support.small_machines:small_main", [*arguments, *overrides], folder=self.folder
        )

    def start_agent(self, name, port, num_machines, *overrides):
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=1", f"--nnodes={num_machines}"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={name}"]
        launcher += ["--max-restarts=3", "--monitor-interval=0.1", "--no-python", sys.executable, "-c"]
        program = "import sys; from tests.support.small_machines import small_main; sys.exit(small_main(sys.argv[1:]))"
        arguments = ["--config", "small.toml", f"--run.name={name}", *SHARED]
        arguments += [f"--engine.rounds={ALL_ROUNDS // 2}", *overrides]
        return start_program(*launcher, program, *arguments, folder=self.folder)

    def wait_until_saved(self, name, step):
        end_s = time.monotonic() + JOIN_S
        while max(self.saved(name), default=0) < step:
            assert time.monotonic() < end_s, f"{name} never saved step {step}"
            time.sleep(0.05)

    def __call__(self, name, num_machines, *overrides, code=0):
        return ended(self.start(name, num_machines, *overrides), code)


def ended(machines, code):
    codes = [machine.wait() for machine in machines]
    texts = [machine.text() for machine in machines]
    assert codes == [code] * len(machines), f"{codes}\n" + "\n---\n".join(texts)
    return texts


@pytest.fixture
def starter(processes):
    return SimpleNamespace(start=partial(start_machines, processes))


@pytest.fixture
def small_machines(starter, tmp_path):
    return SmallMachines(starter, tmp_path)

"""What every test on an accelerator uses: a kind of device, and the simulator's controls.

`kind` is `cuda` if there is a card, otherwise `simulated`. A test that plants a fault by the simulator's own means, or
that chooses a schedule, takes `simulator`; it is skipped on a machine with a card, because one process has one kind.
"""

import gc
from importlib.util import find_spec

import pytest
import torch

from tests.simulated_accelerator import simulator as simulation
from tests.simulated_accelerator.build import NotBuilt
from torchround.accelerators import deterministic_operations, present_kind

# Files whose tests need more than the engine does: whole commands, and another library's texts. They are left out where
# that is not installed, so that scripts/gpu_check.sh runs on a bare machine.
COMMANDS = ("jinja2", "safetensors", "tokenizers", "torchdata")
NEEDS = {
    "test_default_run.py": COMMANDS,
    "test_found_devices.py": COMMANDS,
    "test_generation.py": ("transformers",),
    "test_whole_runs.py": COMMANDS,
}
LACKING = {
    file: lacking for file, names in NEEDS.items() if (lacking := [name for name in names if not find_spec(name)])
}
collect_ignore = list(LACKING)


def pytest_terminal_summary(terminalreporter):
    for file, names in LACKING.items():
        terminalreporter.write_line(f"left out: {file}, which needs {', '.join(names)}")


@pytest.fixture(scope="session")
def kind():
    card = present_kind()
    if card is not None:
        return card.name
    try:
        simulation.load()
    except NotBuilt as error:
        pytest.skip(str(error))
    return simulation.KIND


@pytest.fixture
def simulator(kind):
    if kind != simulation.KIND:
        pytest.skip("this process tests a card, and one process has one kind of accelerator")
    controls = simulation.load()
    gc.collect()  # device memory of earlier tests that only a circle of objects holds
    controls.reset()
    yield controls
    controls.reset()


@pytest.fixture
def two_devices(kind):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")


@pytest.fixture
def card(kind):
    if kind != "cuda":
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def exact(kind):
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with deterministic_operations():
        yield
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if kind == simulation.KIND:
        simulation.load().reset()  # a test that failed may have left a device that refuses everything

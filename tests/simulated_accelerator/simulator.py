"""Loads the simulated accelerator into this process, where PyTorch then knows the device type `simulated`.

`load` returns the controls: the compiled module's functions, which `controls.cpp` lists. Loading cannot be undone, so
no import does it.
"""

import atexit
import functools
import importlib.util
import types
from types import ModuleType
from typing import Any

import torch

from tests.simulated_accelerator.build import NAME, build

KIND = "simulated"
DEVICES = 4


@functools.cache
def load() -> Any:
    """Build it if need be, register it with PyTorch, and return its controls. Raises `NotBuilt`."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None and spec.loader is not None, "the build returns a module's path"
    controls = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(controls)
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _device_module(controls))
    # Its thread must not run kernels while the process takes PyTorch down.
    atexit.register(controls.settle)
    return controls


def _device_module(controls: Any) -> ModuleType:
    """Make `torch.simulated`, with what PyTorch itself asks of it."""
    module = types.ModuleType(f"torch.{KIND}")

    def index(device: Any) -> int:
        found = None if device is None or isinstance(device, int) else torch.device(device).index
        number = device if isinstance(device, int) else found
        return torch.accelerator.current_device_index() if number is None else number

    def seed(number: int, device: Any = None) -> None:
        controls.set_random_state(index(device), number, 0)

    def seed_all(number: int) -> None:
        for device in range(DEVICES):
            seed(number, device)

    def state(device: Any = None) -> torch.Tensor:
        return torch.tensor(controls.random_state(index(device)), dtype=torch.int64).view(torch.uint8)

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        controls.set_random_state(index(device), *state.view(torch.int64).tolist())

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": seed,
        "manual_seed_all": seed_all,
        "get_rng_state": state,
        "set_rng_state": set_state,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module

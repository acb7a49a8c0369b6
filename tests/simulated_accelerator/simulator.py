"""Loads the simulated accelerator into this process, where PyTorch then knows the device type `simulated`.

Loading cannot be undone, and a process can have one such device type, so no import does it: `load` does.
"""

import atexit
import functools
import importlib.util
import types
from contextlib import suppress

import torch

from tests.simulated_accelerator.build import NAME, NotBuilt, build
from torchround import accelerators

__all__ = ["KIND", "NotBuilt", "Simulator", "load"]

KIND = "simulated"
EARLY, LATE = "early", "late"
HALVES = (torch.bfloat16, torch.float16)


class Simulator:
    """What a test may ask of the simulated devices, and set. Devices and streams are PyTorch's own objects.

    The rest of the module's functions can be called on it too; `controls.cpp` lists them.
    """

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)

    def run_adversarially(self, seed, roles=None):
        """Choose by `seed` from now on what runs next.

        An early stream runs each task as soon as its order and its waits allow. A late stream runs only what a host
        thread waits for, and only when all registered threads wait. `roles` has the `early` and `late` streams whose
        role stays; the others draw one, again and again.
        """
        self._module.run_adversarially(seed)
        for stream, role in (roles or {}).items():
            self.set_role(stream, role)

    def set_role(self, stream, role):
        """Make a stream early or late, or let it draw its role again (None)."""
        self._module.set_role(stream.device_index, stream.stream_id, role or "")

    def name_stream(self, stream, name):
        self._module.name_stream(stream.device_index, stream.stream_id, name)

    def synchronous_operations(self):
        """Count by name what made a host thread wait for a device, besides waits for events and streams."""
        return self._module.synchronous_operations()

    def memory_statistics(self, device=0):
        """Return bytes and numbers of allocations; a system allocation is one that no cached memory could serve."""
        return self._module.memory_statistics(device)

    def reset(self):
        self._module.reset()


class SimulatedKind(accelerators.AcceleratorKind):
    locks_pages = True
    events_cross_devices = True

    def __init__(self, simulator):
        super().__init__(KIND)
        self._simulator = simulator

    def card_name(self, index):
        return "Simulated accelerator"

    def lock_pages(self, address, nbytes):
        return self._simulator.host_register(address, nbytes)

    def unlock_pages(self, address):
        return self._simulator.host_unregister(address)

    # With the limits of CUDA's kernels, so that models choose as they do there.

    def has_offset_attention(self, dtype, head_dim):
        return dtype in HALVES and head_dim % 8 == 0 and head_dim <= 256

    def has_grouped_products(self, dtype):
        return dtype == torch.bfloat16

    def has_float32_products(self, dtype):
        return dtype in HALVES


@functools.cache
def load():
    """Build the device if need be, register it with PyTorch and with the project. Raises `NotBuilt`."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None and spec.loader is not None, "the build returns a module's path"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, _device_module(module))
    # Its thread must not run kernels while the process takes PyTorch down.
    atexit.register(module.settle)
    # PyTorch takes no memory for page-locked before it has initialised the device. Asking for its own page-locked memory
    # does that, and then fails: there is none.
    with suppress(RuntimeError):
        torch.empty(1).pin_memory()
    simulator = Simulator(module)
    accelerators.kinds()[KIND] = SimulatedKind(simulator)
    return simulator


def _device_module(controls):
    module = types.ModuleType(f"torch.{KIND}")

    def index(device):
        number = device if device is None or isinstance(device, int) else torch.device(device).index
        return torch.accelerator.current_device_index() if number is None else number

    def seed(number, device=None):
        controls.set_random_state(index(device), number, 0)

    def seed_all(number):
        for device in range(controls.DEVICES):
            seed(number, device)

    def state(device=None):
        return torch.tensor(controls.random_state(index(device)), dtype=torch.int64).view(torch.uint8)

    def set_state(state, device=None):
        controls.set_random_state(index(device), *state.view(torch.int64).tolist())

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: controls.DEVICES,
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

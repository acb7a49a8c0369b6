"""How many cores the optimizer may use beside the threads that drive devices."""

import ctypes
import os
from contextlib import suppress

import torch


def update_threads(num_devices: int) -> int:
    """Threads for the optimizer's operations: a core is left for each device's thread, but half of them are kept.

    Never more than PyTorch's own number (`engine.cpu_threads`). Kernel launches that wait for a core cost a
    device far more than the update loses by one core, being bound by memory.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(available - num_devices, available // 2)))


def use_threads_here(count: int) -> None:
    """Run this thread's parallel operations, PyTorch's and compiled ones, with `count` threads.

    `torch.set_num_threads` would change it for threads yet to come as well, so OpenMP is asked directly, once
    PyTorch has set this thread up. Where that cannot be found, PyTorch's number stays.
    """
    torch.get_num_threads()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(ctypes.c_int(count))

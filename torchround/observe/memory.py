"""Host memory in use."""

import resource

import psutil


def host_gib() -> float:
    """Resident memory of this process in GiB (2^30 bytes), pinned buffers and shared libraries included."""
    return float(psutil.Process().memory_info().rss) / 2**30


def host_peak_gib() -> float:
    """The most that `host_gib` has been in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # counted in KiB

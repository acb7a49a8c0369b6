"""Host memory in use."""

import psutil


def host_gib() -> float:
    """Resident memory of this process in GiB (2^30 bytes), pinned buffers and shared libraries included."""
    return float(psutil.Process().memory_info().rss) / 2**30

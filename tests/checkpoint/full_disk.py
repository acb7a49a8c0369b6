"""A disk that runs full, for tests: the kernel's limit on file sizes fails writes as a quota does."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_limited_to(limit_bytes: int) -> Iterator[None]:
    """Within it, this process can write files up to `limit_bytes` long; writing on is an `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

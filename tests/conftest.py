"""For all tests: one thread inside each operation, signals as in a terminal, and a GPU only where there is one."""

import os
import signal

import pytest

# Read when torch is first imported, here and in the processes that tests start: several of them on two cores would
# otherwise wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Control-C and a hang-up mean to the tests, and to the runs they start, what they mean in a terminal.

    A shell that starts a command in the background has the one ignored, nohup the other, and processes inherit that.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `gpu` on a machine without one; pytest's closing line counts them."""
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_gpu():
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if item not in needs_gpu]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()

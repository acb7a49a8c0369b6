"""PyTorch's stream sanitizer finds no unordered access to device memory, and finds one that is planted.

It compares start addresses only; `test_race_checker.py` is the exact check, and needs no GPU. This file is also the program
that runs under the sanitizer: `python test_sanitizer.py UPDATE WORKERS [planted]`. The sanitizer watches a thread's
operations only where its dispatch mode is entered, so each worker enters it; autograd's threads inherit it.
"""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.device import AcceleratorDevice, Stream
from torchround.engine.errors import PipelineError
from torchround.engine.store.bundles import POLICIES

pytestmark = pytest.mark.usefixtures("card")
CLEAN, OTHER, RACE = 0, 1, 9


def sanitized(*arguments):
    return subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("update", "workers"), [("sync", "1"), ("async", "2")])
def test_no_stream_touches_what_another_one_still_uses(update, workers):
    done = sanitized(update, workers)
    assert done.returncode == CLEAN, done.stderr[-4000:]


def test_a_missing_wait_is_found():
    done = sanitized("sync", "1", "planted")
    assert done.returncode == RACE and "race" in done.stderr.lower(), done.stderr[-4000:]


class SanitizedDevice(AcceleratorDevice):
    """A worker of the first card whose thread is watched. If it is `hasty`, its computation waits for nothing."""

    def __init__(self, worker, mode, hasty):
        super().__init__("cuda:0", worker)
        self.mode, self.hasty = mode, hasty

    def enter_thread(self):
        super().enter_thread()
        self.mode.__enter__()

    def wait(self, stream, event, what=""):
        if not (self.hasty and stream is Stream.COMPUTE):
            super().wait(stream, event, what)


def main(update, workers, planted=""):
    """Train three steps of the tied toy model, cut into one layer a stage."""
    import torch.cuda._sanitizer as sanitizer

    class OneAtATime(sanitizer.CUDASanitizerDispatchMode):
        """A lock around the sanitizer, whose tables are not made for several threads."""

        turn = threading.Lock()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            with self.turn:
                return super().__torch_dispatch__(func, types, args, kwargs)

    mode, counted = OneAtATime(), iter(range(int(workers)))
    with mode:
        model = toy_model(tied=True)
        store = toy_store(model, policy=POLICIES[update], pinned=True)
        options = {"wrap": lambda _: SanitizedDevice(next(counted), mode, bool(planted))}
        try:
            with toy_engine(model, store, PARTITIONS["one layer a stage"], int(workers), **options) as engine:
                train(engine, toy_batches(3, micro_batches=4))
        except PipelineError as error:
            print(error, file=sys.stderr)
            return RACE if isinstance(error.__cause__, sanitizer.CUDASanitizerErrors) else OTHER
    return CLEAN


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

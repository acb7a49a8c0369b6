"""A small run under CUDA's stream sanitizer: `python sanitized_run.py UPDATE WORKERS [planted]`.

The sanitizer watches a thread's operations only where its dispatch mode is entered, so each worker enters it;
autograd's threads inherit it. With `planted`, the compute stream does not wait for uploads. Exit code 0: no
race, 9: a race that the sanitizer found, 1: anything else.
"""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.cuda._sanitizer as sanitizer

from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.device import AcceleratorDevice, Stream
from torchround.engine.errors import PipelineError
from torchround.engine.store.bundles import POLICIES

CLEAN, OTHER, RACE = 0, 1, 9


class OneAtATime(sanitizer.CUDASanitizerDispatchMode):
    """A lock around the sanitizer, whose tables are not made for several threads."""

    def __init__(self):
        super().__init__()
        self.turn = threading.Lock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with self.turn:
            return super().__torch_dispatch__(func, types, args, kwargs)


class SanitizedDevice(AcceleratorDevice):
    """A worker of the first card whose thread is watched."""

    def __init__(self, worker, mode, planted):
        super().__init__("cuda:0", worker)
        self._mode, self._planted = mode, planted

    def enter_thread(self):
        super().enter_thread()
        self._mode.__enter__()

    def _wait(self, stream, event):
        if not (self._planted and stream is Stream.COMPUTE):
            super()._wait(stream, event)


def main(update, workers, planted=""):
    """Train three steps of the tied toy model, cut into one layer a stage."""
    mode = OneAtATime()
    counted = iter(range(int(workers)))
    with mode:
        model = toy_model(tied=True)
        store = toy_store(model, policy=POLICIES[update], pinned=True)
        try:
            with toy_engine(
                model,
                store,
                PARTITIONS["one layer a stage"],
                int(workers),
                wrap=lambda _: SanitizedDevice(next(counted), mode, bool(planted)),
            ) as engine:
                train(engine, toy_batches(3, micro_batches=4))
        except PipelineError as error:
            print(error, file=sys.stderr)
            return RACE if isinstance(error.__cause__, sanitizer.CUDASanitizerErrors) else OTHER
    return CLEAN


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

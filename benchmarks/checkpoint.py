"""What checkpoints cost: a step beside a save, and saving and loading beside the disk's own speed."""

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from benchmarks.frame import Benchmark, Report, in_fresh_process, in_turns, peak_bytes, timed
from benchmarks.timed_layers import costs_of, empty_micro_batches, timed_model
from torchround.checkpoint import Checkpointer
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.saver import SaveSource
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel
from torchround.planning.partition import Partition

LAYERS, DEVICES, MICRO_BATCHES = 8, 2, 4
CHUNK_BYTES = 2**23
MODES = ("none", "blocking", "beside")
WAYS = ("cached", "direct", "passing")


def heavy_model(parameters: int, forward_s: float) -> LayeredModel:
    """Build `LAYERS` layers that take `forward_s` forward and twice that backward, and hold these parameters."""
    costs = costs_of([(forward_s, 2 * forward_s)] * LAYERS)
    return timed_model(costs, unused_parameters=[parameters // LAYERS] * LAYERS)


def filled_store(model: LayeredModel) -> HostStore:
    """Make a store and write to every buffer, so that the system has given it all its pages."""
    store = HostStore(model)
    store.allocate_gradients(rounds=1)
    for bundle in store.trained:
        assert bundle.gradient is not None, "a trained bundle lacks its gradient"
        for index, flat in enumerate((*bundle.state(), bundle.gradient)):
            flat.uniform_(0.1 * index, 0.1 * index + 0.1)
    store.refresh_device_weights()
    return store


# A step beside a save.


def beside_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of a run beside saves."""
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured (default: the temporary folder)"
    )
    parser.add_argument("--parameters", type=int, default=48 * 2**20, help="size of the model")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block, all but the last saved")
    parser.add_argument("--steps-per-save", type=float, default=2.0, help="length of a step, in saves")
    parser.add_argument("--turns", type=int, default=12, help="blocks of each kind")


def beside(options: argparse.Namespace) -> Report:
    """Train blocks of each mode in turns, all by one engine."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        store = filled_store(heavy_model(options.parameters, 0.0))
        save_s = max(
            timed(lambda: Checkpointer(folder, 1).save(0, store.named_views(), store.resume_state()))
            for _ in range(2)
        )
        # A step takes 4 forwards of each layer for each micro-batch (one of them recomputes), shared by the devices.
        forward_s = options.steps_per_save * save_s * DEVICES / (MICRO_BATCHES * LAYERS * 4)
        model = heavy_model(options.parameters, forward_s)
        partition = Partition((2, 2, 2), 2, (2, 2, 2))
        devices = [CpuDevice(index) for index in range(DEVICES)]
        with Engine(model, store, devices, partition, optimizer=AdamWTable()) as engine:
            blocks = SavedBlocks(engine, store, folder / "checkpoints", options.steps)
            blocks.run("none")  # not counted: the first steps allocate
            block_s = in_turns({mode: partial(blocks.run, mode) for mode in MODES}, options.turns)
    finally:
        shutil.rmtree(folder)
    costs_s = {
        mode: [
            (s - none_s) / (options.steps - 1)
            for s, none_s in zip(block_s[mode], block_s["none"], strict=True)
        ]
        for mode in ("blocking", "beside")
    }
    cost_s = {mode: statistics.median(costs) for mode, costs in costs_s.items()}
    return {
        "parameters": options.parameters,
        "save_s": save_s,
        "step_s": statistics.median(block_s["none"]) / options.steps,
        "save_costs_s": cost_s,
        "cost_percent_of_blocking": 100 * cost_s["beside"] / cost_s["blocking"],
        "longest_wait_for_save_s": blocks.longest_wait_s,
        "longest_save_s": blocks.longest_save_s,
        "costs_s": costs_s,
    }


class SavedBlocks:
    """Blocks of steps that end drained. All steps of a block but the last are saved in one way, or not at all."""

    def __init__(self, engine: Engine, store: HostStore, folder: Path, steps: int) -> None:
        self._engine = engine
        self._store = store
        self._checkpointer = Checkpointer(folder, keep_latest_k=1)
        self._steps = steps
        self.longest_wait_s = self.longest_save_s = 0.0

    def run(self, mode: str) -> float:
        """Train one block and return its seconds."""
        start_s = time.perf_counter()
        results, saves = [], []
        for index in range(self._steps):
            results.append(self._engine.forward_backward(empty_micro_batches(MICRO_BATCHES)))
            self._engine.step(lr=1e-3)
            if mode == "blocking" and index < self._steps - 1:
                self._engine.drain()
                self._checkpointer.save(
                    self._store.step, self._store.named_views(), self._store.resume_state()
                )
            elif mode == "beside" and index < self._steps - 1:
                saves.append(self._engine.save(self._save_beside))
                saves[-1].may_publish()
        self._engine.drain()
        took_s = time.perf_counter() - start_s
        self.longest_save_s = max(self.longest_save_s, *(save.result() for save in saves), 0.0)
        waits_s = [result.update().waited_for_save_s for result in results]
        self.longest_wait_s = max(self.longest_wait_s, *waits_s)
        return took_s

    def _save_beside(self, source: SaveSource) -> float:
        return timed(lambda: self._checkpointer.save(source.step, source.tensors, source.state, source))


BESIDE = Benchmark(
    """What a save beside training adds to a step, beside what a blocking save adds.

Layers sleep for a known time, so that a step takes --steps-per-save times as long as a save. A block is a few steps;
each but the last is not saved, saved blocking, or saved beside the next one. The cost of a save is the median of how
much longer such a block takes than the block without saves in the same turn.""",
    beside_options,
    beside,
    lambda figures: (
        f"adds {figures['save_costs_s']['beside']:.3f} s to a step ({figures['cost_percent_of_blocking']:.1f} %)",
        f"a blocking save adds {figures['save_costs_s']['blocking']:.2f} s",
    ),
    "--parameters 800000 --steps 2 --turns 1",
)


# The disk.


def speed_options(parser: argparse.ArgumentParser) -> None:
    """Add the size and the disk."""
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured (default: the temporary folder)"
    )
    parser.add_argument("--parameters", type=int, default=320_000_000, help="size of the model")
    parser.add_argument("--turns", type=int, default=5, help="saves and loads of each kind")
    parser.add_argument(
        "--settle-s", type=float, default=1.0, help="rest of the disk before each, in seconds"
    )


def speed(options: argparse.Namespace) -> Report:
    """Measure in a process of its own, so that the peak memory is the save's."""
    return in_fresh_process(
        save_and_load, options.folder, options.parameters, options.turns, options.settle_s
    )


def save_and_load(parent: Path | None, parameters: int, turns: int, settle_s: float) -> Report:
    """Save and load beside plain loops, in turns."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        store = filled_store(heavy_model(parameters, 0.0))
        views = store.named_views()
        plain = PlainLoops(folder, sum(view.nbytes for view in views.values()))
        checkpointer = Checkpointer(folder / "checkpoints")
        # What the first save of a process loads does not belong to the measured ones.
        checkpointer.save(0, {"small": torch.zeros(1)}, {})
        held_bytes = peak_bytes()
        writes: dict[str, Callable[[], object]] = {
            "save": lambda: checkpointer.save(1, views, {}),
            **{way: partial(plain.write, way) for way in WAYS},
        }
        reads: dict[str, Callable[[], object]] = {
            "load": lambda: checkpointer.load_latest(views),
            **{way: partial(plain.read, way) for way in WAYS},
        }

        def delete(name: str) -> None:
            checkpointer.delete(checkpointer.checkpoints().values() if name == "save" else [])
            plain.path(name).unlink(missing_ok=True)

        written = in_turns(uncached(writes, folder, settle_s, delete), turns)
        read = in_turns(uncached(reads, folder, settle_s, lambda name: None), turns)
        extra_bytes = peak_bytes() - held_bytes
    finally:
        shutil.rmtree(folder)
    return {
        "parameters": store.num_parameters(),
        "gb": plain.nbytes / 1e9,
        "save": compared("save", written, plain.nbytes),
        "load": compared("load", read, plain.nbytes),
        "held_gib": held_bytes / 2**30,
        "extra_memory_percent": 100 * extra_bytes / held_bytes,
    }


Seconds = tuple[float, float]  # of the clock, of a processor


def uncached(
    works: dict[str, Callable[[], object]], folder: Path, settle_s: float, prepare: Callable[[str], None]
) -> dict[str, Callable[[], Seconds]]:
    """Return the works so that each starts with no file in the page cache and the disk at rest, and is timed."""

    def run(name: str) -> Seconds:
        prepare(name)
        drop_from_cache(folder)
        os.sync()
        time.sleep(settle_s)
        processor_s = time.process_time()
        clock_s = timed(works[name])
        return clock_s, time.process_time() - processor_s

    return {name: partial(run, name) for name in works}


def drop_from_cache(folder: Path) -> None:
    """Make the next read of each file go to the disk. The files are synced already."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compared(ours: str, seconds: dict[str, list[Seconds]], nbytes: int) -> dict[str, Any]:
    """Return medians in GB/s, ours in percent of each plain way and of the fastest one, and a processor's seconds."""
    gb_per_s = {
        name: nbytes / 1e9 / statistics.median(s for s, _ in times) for name, times in seconds.items()
    }
    fastest = max(WAYS, key=lambda way: gb_per_s[way])
    return {
        "gb_per_s": gb_per_s,
        "percent_of": {way: 100 * gb_per_s[ours] / gb_per_s[way] for way in WAYS},
        "percent_of_disk": 100 * gb_per_s[ours] / gb_per_s[fastest],
        "processor_s": {name: statistics.median(s for _, s in times) for name, times in seconds.items()},
        "seconds": {name: [s for s, _ in times] for name, times in seconds.items()},
    }


class PlainLoops:
    """Sequential writes and reads of `nbytes` between one file and one aligned buffer, without a checksum."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._folder = folder
        self._buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        self._buffer[:] = os.urandom(CHUNK_BYTES)

    def path(self, way: str) -> Path:
        """Return the file that `write` makes this way."""
        return self._folder / way

    def write(self, way: str) -> None:
        """Write the file, which must not exist yet, and sync it."""
        with self._opened(way, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as file:
            for chunk in self._chunks(way, file):
                assert file.write(chunk) == len(chunk), "a plain write was cut short"
            os.fsync(file.fileno())

    def read(self, way: str) -> None:
        """Read the file that `write` made this way."""
        with self._opened(way, os.O_RDONLY) as file:
            for chunk in self._chunks(way, file):
                num_read = file.readinto(chunk)  # type: ignore[attr-defined]
                assert num_read == len(chunk), "a plain read was cut short"

    def _chunks(self, way: str, file: BinaryIO) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, CHUNK_BYTES):
            # Direct transfers are whole blocks: the last one may be longer than what is left.
            left_bytes = CHUNK_BYTES if way == "direct" else self.nbytes - start
            yield self._buffer[:left_bytes]
            if way == "passing":
                os.posix_fadvise(file.fileno(), 0, start + CHUNK_BYTES, os.POSIX_FADV_DONTNEED)

    def _opened(self, way: str, flags: int) -> BinaryIO:
        flags |= os.O_DIRECT if way == "direct" else 0
        mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "wb"
        return open(os.open(self.path(way), flags, 0o666), mode, buffering=0)


SPEED = Benchmark(
    """Speed of saving and loading a checkpoint, beside plain loops over one file of the same size.

The loops write a file, sync it and read it back: through the page cache as dd conv=fsync does (cached), past it as dd
oflag=direct does (direct), and through it with the pages given back behind (passing). Before each, files are dropped
from the cache, older ones deleted, and the disk rests for --settle-s. `percent_of_disk` compares with the fastest of
the three, which is the disk's own speed as far as one thread can tell. The peak memory is compared with what the
process held before.""",
    speed_options,
    speed,
    lambda figures: (
        "; ".join(f"{way} {figures[way]['gb_per_s'][way]:.2f} GB/s" for way in ("save", "load")),
        "; ".join(
            f"{figures[way]['percent_of_disk']:.0f} % of the fastest plain loop" for way in ("save", "load")
        ),
    ),
    "--parameters 800000 --turns 1 --settle-s 0",
)

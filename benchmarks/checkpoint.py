"""What checkpoints cost: a step beside a save, and saving and loading against the disk's own speed.

    python benchmarks/checkpoint.py beside --folder /somewhere/on/the/disk
    python benchmarks/checkpoint.py disk --folder /somewhere/on/the/disk

`beside` trains layers that sleep for a known time, so that a step takes `--steps-per-save` times as long as a save, in
blocks of a few steps, each of which but the last is not saved, saved blocking, or saved beside the next one. What a save
costs is the median of how much longer such a block is than the one without in the same turn.
`disk` saves and loads the state of a model of `--parameters`, in turns with plain loops that write as many bytes to one
file, sync it, and read it back: through the page cache as `dd conv=fsync` does (`cached`), past it as
`dd oflag=direct` does (`direct`), and through it with the pages given back behind (`passing`). Files are dropped from the
cache before each, older ones are deleted and the disk has a second to settle, and each turn begins with another way.
What a save or load reaches is given in percent of each, by the medians, and of the fastest of the three, which is the
disk's own speed as far as one thread can tell. Runs in a
process of its own, whose peak memory is compared with what it held before. Prints JSON.
"""

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from benchmarks.timed_layers import Sleeper, SleepLayer
from torchround.checkpoint import Checkpointer
from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.saver import SaveSource
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.partition import Partition

LAYERS, DEVICES, MICRO_BATCHES = 8, 2, 4
PIECE_BYTES = 2**23
MODES = ("none", "blocking", "beside")
WAYS = ("cached", "direct", "passing")
SETTLE_S = 1.0


class HeavySleepLayer(SleepLayer):
    """A layer of known time with weights that nothing computes with, and that are updated and saved."""

    def __init__(self, sleeper: Sleeper, seconds: tuple[float, float], is_last: bool, numel: int) -> None:
        super().__init__(sleeper, *seconds, is_last)
        self.ballast = nn.Parameter(torch.empty(numel, device="meta"))


def heavy_model(parameters: int, forward_s: float) -> LayeredModel:
    """`LAYERS` layers of `forward_s` forward and twice that backward."""
    sleeper = Sleeper()
    layers = tuple(
        HeavySleepLayer(sleeper, (forward_s, 2 * forward_s), index == LAYERS - 1, parameters // LAYERS)
        for index in range(LAYERS)
    )
    return LayeredModel(tuple(f"layer.{index}" for index in range(LAYERS)), layers)


def store_of(model: LayeredModel) -> HostStore:
    """With every buffer written to, so that its pages are there."""
    store = HostStore(model)
    store.allocate_gradients(rounds=1)
    for bundle in store.trained:
        for index, flat in enumerate((bundle.weight, bundle.exp_avg, bundle.exp_avg_sq, bundle.gradient)):
            assert flat is not None, "a trained bundle lacks a buffer"
            flat.uniform_(0.1 * index, 0.1 * index + 0.1)
    store.refresh_masters()
    return store


class Steps:
    """Steps in blocks that end drained, each but a block's last one saved in some way, or none."""

    def __init__(self, engine: Engine, store: HostStore, folder: Path) -> None:
        self._engine = engine
        self._store = store
        self._checkpointer = Checkpointer(folder, keep_latest_k=1)
        self.longest_wait_s = self.longest_save_s = 0.0

    def block(self, mode: str, steps: int) -> float:
        """Seconds of `steps` steps."""
        zeros = torch.zeros(1, 2, dtype=torch.int64)
        start_s = time.perf_counter()
        results, saves = [], []
        for index in range(steps):
            results.append(
                self._engine.forward_backward([MicroBatch(zeros, zeros, zeros, zeros)] * MICRO_BATCHES)
            )
            self._engine.step(lr=1e-3)
            if mode == "blocking" and index < steps - 1:
                self._engine.drain()
                self._checkpointer.save(
                    self._store.step, self._store.named_views(), self._store.resume_state()
                )
            elif mode == "beside" and index < steps - 1:
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


def beside(options: argparse.Namespace) -> dict[str, Any]:
    """Blocks of each mode, in turns, by one engine."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        store = store_of(heavy_model(options.parameters, 0.0))
        save_s = max(
            timed(lambda: Checkpointer(folder, 1).save(0, store.named_views(), store.resume_state()))
            for _ in range(2)
        )
        # A step's layers take 4 forwards of each (one of them recomputing) on 2 devices.
        forward_s = options.steps_per_save * save_s * DEVICES / (MICRO_BATCHES * LAYERS * 4)
        model = heavy_model(options.parameters, forward_s)
        partition = Partition((2, 2, 2), 2, (2, 2, 2))
        devices = [CpuDevice(index) for index in range(DEVICES)]
        block_s: dict[str, list[float]] = {mode: [] for mode in MODES}
        with Engine(model, store, devices, partition, optimizer=OptimizerTable()) as engine:
            steps = Steps(engine, store, folder / "checkpoints")
            steps.block("none", 2)
            for turn in range(options.turns):
                for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                    block_s[mode].append(steps.block(mode, options.steps))
                    print(f"turn {turn + 1}: {mode} {block_s[mode][-1]:.2f} s", file=sys.stderr)
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
        "longest_wait_for_save_s": steps.longest_wait_s,
        "longest_save_s": steps.longest_save_s,
        "costs_s": costs_s,
    }


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def disk(options: argparse.Namespace) -> dict[str, Any]:
    """Save and load beside plain loops, in turns."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        store = store_of(heavy_model(options.parameters, 0.0))
        views = store.named_views()
        plain = PlainLoops(folder, sum(view.nbytes for view in views.values()))
        checkpointer = Checkpointer(folder / "checkpoints")
        checkpointer.save(0, {"small": torch.zeros(1)}, {})  # what is loaded on first use is not the save's
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

        written_s = in_turns(folder, writes, options.turns, delete)
        read_s = in_turns(folder, reads, options.turns)
        extra_bytes = peak_bytes() - held_bytes
    finally:
        shutil.rmtree(folder)
    return {
        "parameters": store.num_parameters(),
        "gb": plain.nbytes / 1e9,
        "save": compared("save", written_s, plain.nbytes),
        "load": compared("load", read_s, plain.nbytes),
        "held_gib": held_bytes / 2**30,
        "extra_memory_percent": 100 * extra_bytes / held_bytes,
    }


def in_turns(
    folder: Path,
    works: dict[str, Callable[[], object]],
    turns: int,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each work in each turn, and how many of a processor's, prepared and with no file cached; each turn
    begins with another one."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    names = list(works)
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            prepare(name)
            drop_from_cache(folder)
            os.sync()
            time.sleep(SETTLE_S)
            start_s = time.process_time()
            seconds[name].append((timed(works[name]), time.process_time() - start_s))
            print(f"turn {turn + 1}: {name} {seconds[name][-1][0]:.2f} s", file=sys.stderr)
    return seconds


def compared(ours: str, seconds: dict[str, list[tuple[float, float]]], nbytes: int) -> dict[str, Any]:
    """Medians in GB/s, ours in percent of each plain way and of the fastest one, and processors' seconds."""
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
    """Sequential writes and reads of `nbytes` between one file and one aligned piece of memory, with no checksum."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self._folder = folder
        self._piece = memoryview(mmap.mmap(-1, PIECE_BYTES))
        self._piece[:] = os.urandom(PIECE_BYTES)

    def path(self, way: str) -> Path:
        """The file that is written this way."""
        return self._folder / way

    def write(self, way: str) -> None:
        """It must not be there."""
        with self._opened(way, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as file:
            for piece in self._pieces(way, file):
                assert file.write(piece) == len(piece), "a plain write was cut short"
            os.fsync(file.fileno())

    def read(self, way: str) -> None:
        """What was written this way."""
        with self._opened(way, os.O_RDONLY) as file:
            for piece in self._pieces(way, file):
                num_read = file.readinto(piece)  # type: ignore[attr-defined]
                assert num_read == len(piece), "a plain read was cut short"

    def _pieces(self, way: str, file: BinaryIO) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, PIECE_BYTES):
            # Direct transfers are whole blocks: the last one may be longer than what is left.
            left_bytes = PIECE_BYTES if way == "direct" else self.nbytes - start
            yield self._piece[:left_bytes]
            if way == "passing":
                os.posix_fadvise(file.fileno(), 0, start + PIECE_BYTES, os.POSIX_FADV_DONTNEED)

    def _opened(self, way: str, flags: int) -> BinaryIO:
        flags |= os.O_DIRECT if way == "direct" else 0
        mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "wb"
        return open(os.open(self.path(way), flags, 0o666), mode, buffering=0)


def drop_from_cache(folder: Path) -> None:
    """Have the next read of each file go to the disk; they are synced."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_bytes() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure in a fresh process and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("beside", "disk"))
    parser.add_argument(
        "--folder", type=Path, help="on the disk to be measured (default: the temporary folder)"
    )
    parser.add_argument("--parameters", type=int, help="of the model (default: 48 Mi beside, 320 M disk)")
    parser.add_argument("--steps", type=int, default=4, help="of a block beside saves")
    parser.add_argument("--steps-per-save", type=float, default=2.0, help="length of a step, in saves")
    parser.add_argument("--turns", type=int, help="measurements of each kind (default: 12 beside, 5 disk)")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parameters = options.parameters or {"beside": 48 * 2**20, "disk": 320_000_000}[options.part]
    options.turns = options.turns or {"beside": 12, "disk": 5}[options.part]
    if not options.in_this_process:
        sys.exit(subprocess.run([sys.executable, *sys.argv, "--in-this-process"], check=False).returncode)
    torch.set_num_threads(1)
    report = {"beside": beside, "disk": disk}[options.part](options)
    print(json.dumps({"part": options.part, "load_average": os.getloadavg()[0], **report}, indent=2))


if __name__ == "__main__":
    main()

"""`torch.distributed.pipelining`'s schedules on the layers of bench_schedule.py (timed_layers.py): one gloo process a device.

    python benchmarks/rival_pipelines.py --devices 8 --microbatches 16 --scale 1

Blocks recompute in their backward (4 + 8 ms after a forward of 4), the head of 2.3 blocks does not; each device
holds as many blocks as the others, the last one the head too. The bubble is 1 - work / (N x step time), median
over the steps. Prints JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from benchmarks.timed_layers import BLOCK_BACKWARD_S, BLOCK_FORWARD_S, HEAD_BLOCKS, Sleeper, SleepFunction

WIDTH = 8
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved_1f1b_v2": (ScheduleInterleaved1F1B, 2),
    "interleaved_1f1b_v4": (ScheduleInterleaved1F1B, 4),
    "looped_bfs_v4": (ScheduleLoopedBFS, 4),
}


class Part(nn.Module):
    """Consecutive layers on one device: `(forward_s, backward_s)` each."""

    def __init__(self, layers: list[tuple[float, float]], sleeper: Sleeper) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.layers = layers
        self.sleeper = sleeper

    def forward(self, hidden: Tensor) -> Tensor:
        for forward_s, backward_s in self.layers:
            hidden = SleepFunction.apply(hidden, self.weight, self.sleeper, forward_s, backward_s)
        return hidden


def part_layers(index: int, parts: int, blocks: int, scale: float) -> list[tuple[float, float]]:
    """The layers of part `index`: an even share of the blocks, and the head in the last one."""
    block = (BLOCK_FORWARD_S * scale, (BLOCK_FORWARD_S + BLOCK_BACKWARD_S) * scale)
    layers = [block] * (blocks // parts)
    if index == parts - 1:
        layers.append((HEAD_BLOCKS * BLOCK_FORWARD_S * scale, HEAD_BLOCKS * BLOCK_BACKWARD_S * scale))
    return layers


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One device's process: every schedule in turn; rank 0 writes the step times."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.devices
    )
    seconds = {name: measure(rank, name, options) for name in SCHEDULES}
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(rank: int, name: str, options: argparse.Namespace) -> float:
    """Median seconds of a step under one schedule."""
    schedule_class, per_device = SCHEDULES[name]
    parts = options.devices * per_device
    sleeper = Sleeper()
    stages = [
        PipelineStage(
            Part(part_layers(index, parts, options.blocks, options.scale), sleeper),
            index,
            parts,
            torch.device("cpu"),
        )
        for index in range(rank, parts, options.devices)
    ]
    only = stages if per_device > 1 else stages[0]
    schedule = schedule_class(only, options.microbatches, loss_fn=lambda output, _: output.sum())
    batch = torch.zeros(options.microbatches, 2, WIDTH)
    times = []
    for _ in range(1 + options.steps):
        dist.barrier()
        start = time.perf_counter()
        last = rank == (parts - 1) % options.devices
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if last else {}))
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def bubbles(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Step time and bubble of every schedule."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options, folder), nprocs=options.devices)
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    layers = part_layers(0, 1, options.blocks, options.scale)
    work_s = sum(forward + backward for forward, backward in layers) * options.microbatches
    return {
        name: {"step_s": step_s, "bubble": 1 - work_s / (options.devices * step_s)}
        for name, step_s in seconds.items()
    }


def main() -> None:
    """Run them all and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="processes, one a device")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    parser.add_argument(
        "--blocks", type=int, default=32, help="blocks before the head; a multiple of 4 x devices"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every layer's time")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    print(json.dumps(bubbles(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()

"""The schedules of `torch.distributed.pipelining` on the timed layers: one gloo process for each device.

Blocks recompute in their backward (4 + 8 ms after a forward of 4 ms), the head does not. Each device holds the same
number of blocks, and the last one also the head. The bubble is 1 - work / (devices x median step time).
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

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
# Name: schedule, and stages on each device.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved_1f1b_v2": (ScheduleInterleaved1F1B, 2),
    "interleaved_1f1b_v4": (ScheduleInterleaved1F1B, 4),
    "looped_bfs_v4": (ScheduleLoopedBFS, 4),
}


class _Pipeline(NamedTuple):
    """The shape that all schedules run: layer times are multiplied by `scale`, `steps` are measured."""

    devices: int
    microbatches: int
    blocks: int
    scale: float
    steps: int


class TimedStage(nn.Module):
    """Consecutive layers on one device: `(forward_s, backward_s)` each."""

    def __init__(self, layers: list[tuple[float, float]], sleeper: Sleeper) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.layers = layers
        self.sleeper = sleeper

    def forward(self, hidden: Tensor) -> Tensor:
        """Pass on the hidden states, (B, 2, WIDTH), after the layers' time."""
        for forward_s, backward_s in self.layers:
            hidden = SleepFunction.apply(hidden, self.weight, self.sleeper, forward_s, backward_s)
        return hidden


def stage_layers(index: int, stages: int, blocks: int, scale: float) -> list[tuple[float, float]]:
    """Return the layers of stage `index`: an even share of the blocks, and in the last stage the head."""
    block = (BLOCK_FORWARD_S * scale, (BLOCK_FORWARD_S + BLOCK_BACKWARD_S) * scale)
    layers = [block] * (blocks // stages)
    if index == stages - 1:
        layers.append((HEAD_BLOCKS * BLOCK_FORWARD_S * scale, HEAD_BLOCKS * BLOCK_BACKWARD_S * scale))
    return layers


def rival_bubbles(
    devices: int, microbatches: int, blocks: int, scale: float, steps: int
) -> dict[str, dict[str, float]]:
    """Measure the step time in seconds and the bubble of every schedule."""
    pipeline = _Pipeline(devices, microbatches, blocks, scale, steps)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, args=(pipeline, folder), nprocs=devices)
        seconds = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
    layers = stage_layers(0, 1, blocks, scale)
    work_s = sum(forward + backward for forward, backward in layers) * microbatches
    return {
        name: {"step_s": step_s, "bubble": 1 - work_s / (devices * step_s)}
        for name, step_s in seconds.items()
    }


def _run_rank(rank: int, pipeline: _Pipeline, folder: str) -> None:
    """Run one device's process: every schedule in turn. Rank 0 writes the step times."""
    # Without this gloo resolves the machine's own name, which a container may not know.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=pipeline.devices
    )
    seconds = {name: _measure_schedule(rank, name, pipeline) for name in SCHEDULES}
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
    dist.destroy_process_group()


def _measure_schedule(rank: int, name: str, pipeline: _Pipeline) -> float:
    """Return the median seconds of a step under one schedule; the first step is not counted."""
    schedule_class, per_device = SCHEDULES[name]
    num_stages = pipeline.devices * per_device
    sleeper = Sleeper()
    stages = [
        PipelineStage(
            TimedStage(stage_layers(index, num_stages, pipeline.blocks, pipeline.scale), sleeper),
            index,
            num_stages,
            torch.device("cpu"),
        )
        for index in range(rank, num_stages, pipeline.devices)
    ]
    # Schedules of one stage per device take the stage itself, the others a list.
    schedule = schedule_class(
        stages if per_device > 1 else stages[0], pipeline.microbatches, loss_fn=lambda output, _: output.sum()
    )
    batch = torch.zeros(pipeline.microbatches, 2, WIDTH)
    times = []
    for _ in range(1 + pipeline.steps):
        dist.barrier()
        start = time.perf_counter()
        last = rank == (num_stages - 1) % pipeline.devices
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if last else {}))
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])

"""What the optimizer adds to a sync step: layers of known time, and an optimizer slowed down to a known time.

    python scripts/bench_optimizer_overlap.py --devices 8 --microbatches 16

The layers of scripts/bench_schedule.py. The update of each layer sleeps its share of `--optimizer` times the time
that the devices spend on a step's forward (micro-batches x layers / devices); everything else is the engine as it
is. Updates run layer by layer while the next forward runs on the layers that are done, so a step should hardly
grow as long as the optimizer is the faster of the two. The runs take turns. Prints JSON.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from scripts.bench_schedule import measure
from scripts.timed_layers import BLOCK_BYTES, Sleeper, sleep_costs
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.plan import make_plan


@contextmanager
def slow_optimizer(seconds_by_layer: list[float]) -> Iterator[None]:
    """Within the block, each layer's update takes its seconds longer."""
    original, sleeper = OptimizerWorker._update_bundle, Sleeper()

    def slow(worker: OptimizerWorker, bundle: Any, *arguments: Any) -> None:
        sleeper.sleep(seconds_by_layer[bundle.layers[0]])
        original(worker, bundle, *arguments)

    OptimizerWorker._update_bundle = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        OptimizerWorker._update_bundle = original  # type: ignore[method-assign]


def main() -> None:
    """Measure a step with each optimizer time, in turns, and print how much longer it is than with none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    parser.add_argument("--blocks", type=int, default=32, help="blocks before the head")
    parser.add_argument("--stage-blocks", type=float, default=3, help="blocks that fit on a device")
    parser.add_argument("--scale", type=float, default=2.0, help="factor on every layer's time")
    parser.add_argument("--steps", type=int, default=8, help="measured steps; a multiple of the devices")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument(
        "--optimizer",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.9],
        help="optimizer times, in forwards",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = sleep_costs(options.blocks, options.scale)
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    plan = make_plan(costs, options.devices, options.microbatches, "sync", limits=limits)
    passes = options.microbatches / options.devices
    forward_s = sum(layer.forward_s for layer in costs.layers) * passes
    step_s: dict[float, list[float]] = {share: [] for share in (0.0, *options.optimizer)}
    for _ in range(options.turns):
        for share, times in step_s.items():
            with slow_optimizer([share * layer.forward_s * passes for layer in costs.layers]):
                times.append(measure(costs, plan, options.steps).step_s)
    without_s = statistics.median(step_s[0.0])
    report = {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "scale": options.scale,
        "load_average": os.getloadavg()[0],
        "partition": [plan.partition.forward, plan.partition.fused, plan.partition.backward],
        "simulated_step_s": plan.step_s,
        "forward_s": forward_s,
        "step_s": without_s,
        "with_optimizer": [
            {
                "optimizer_s": share * forward_s,
                "step_s": statistics.median(times),
                "added_percent": 100 * (statistics.median(times) / without_s - 1),
            }
            for share, times in step_s.items()
            if share > 0
        ],
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

"""A backward stage of dense blocks that replays what it keeps, beside one that recomputes, on this machine's processor."""

import argparse
import statistics
import time
from typing import NamedTuple

import torch

from benchmarks.frame import Benchmark, Option, Report, in_turns, median_ratio
from benchmarks.plain_loops import LR, random_step
from torchround.config import AdamWTable, TrainingTable
from torchround.engine.device import CpuDevice, Mark, Stream
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.layer import KEEPABLE
from torchround.models import FAMILIES
from torchround.planning.partition import KeptNames, Partition, StageKind

# The most that a stage that keeps everything may take of one that recomputes. The products of a block are a third of
# their backward and recomputation together, so no ratio is below 0.67 for a block of products alone.
MOST_RATIO = 0.75
VOCABULARY = 512
HEAD_CHANNELS = 64
QUERIES_PER_KEY = 4


class ProcessorMark(Mark):
    """A point in the work of a device's thread whose time is the processor time of that thread."""

    def __init__(self) -> None:
        super().__init__()
        self._thread_s = time.thread_time()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, ProcessorMark), "all marks of a device are alike"
        return self._thread_s - earlier._thread_s


class ProcessorTimedDevice(CpuDevice):
    """A virtual device whose times leave out what other programs take from its thread."""

    def mark(self, stream: Stream) -> Mark:
        return ProcessorMark()


class StageTimes(NamedTuple):
    """Processor seconds of one step's backward stage, and the step's loss.

    `compute_s` is of its computations, `whole_s` from the first computation to the last, copies included.
    """

    compute_s: float
    whole_s: float
    loss: float


def measure(options: argparse.Namespace) -> Report:
    """Train both sides on the same tokens, step by step in turns."""
    size, blocks = options.hidden_size, options.blocks
    config = FAMILIES["llama3"].config_from_flavor(
        "debug",
        vocab_size=VOCABULARY,
        num_layers=blocks,
        hidden_size=size,
        ffn_size=3 * size,
        num_heads=size // HEAD_CHANNELS,
        num_kv_heads=size // HEAD_CHANNELS // QUERIES_PER_KEY,
        head_dim=HEAD_CHANNELS,
    )
    # The embedding has a stage of its own: it keeps nothing, and its backward is not what is measured.
    partition = Partition((1, blocks), 1, (blocks, 1))
    training = TrainingTable(seq_len=options.tokens, global_batch_size=1, micro_batch_size=1)
    micro_batches = random_step(training, VOCABULARY, torch.Generator().manual_seed(0))

    def engine(kept: KeptNames) -> Engine:
        model = FAMILIES["llama3"].build(config)
        store = HostStore(model, torch.float32)
        store.initialize(model, seed=0)
        parts = model, store, [ProcessorTimedDevice(0)], partition
        return Engine(*parts, optimizer=AdamWTable(), settings=EngineSettings(kept=kept))

    def one_step(running: Engine) -> StageTimes:
        result = running.forward_backward(micro_batches)
        running.step(LR)
        running.drain()
        [stage] = [
            report
            for report in result.reports()
            if report.task.stage.kind is StageKind.BACKWARD and report.task.stage.stop == blocks + 1
        ]
        first, last = stage.spans[0], stage.spans[-1]
        return StageTimes(stage.busy_s, last.end.seconds_since(first.start), result.loss())

    with engine(((), *[KEEPABLE] * blocks, ())) as kept, engine(()) as recomputed:
        sides = {"kept": lambda: one_step(kept), "recomputed": lambda: one_step(recomputed)}
        found = in_turns(sides, options.turns, warm_up_turns=1)
    # By quantity: those of the kept side, then those of the other.
    compute_s, whole_s, losses = (
        [[times[index] for times in found[side]] for side in ("kept", "recomputed")] for index in range(3)
    )
    return {
        "losses_equal": losses[0] == losses[1],
        "kept_s": statistics.median(compute_s[0]),
        "recomputed_s": statistics.median(compute_s[1]),
        "ratio": median_ratio(*compute_s),
        "ratio_with_copies": median_ratio(*whole_s),
    }


def missed_bounds(figures: Report) -> list[str]:
    """List each bound that was missed, one line each."""
    missed = [] if figures["losses_equal"] else ["the losses of both sides differ"]
    if figures["ratio"] > MOST_RATIO:
        missed.append(f"the stage takes {figures['ratio']:.3f} of one that recomputes, at most {MOST_RATIO}")
    return missed


KEPT_STAGE = Benchmark(
    """A backward stage of dense blocks with everything kept, beside one that recomputes, on this machine's processor.

The engine trains both sides in float32 on one virtual device each, which computes with one thread, in turns. Times are
processor time of the device's thread between the engine's marks of the blocks' backward stage, so that other programs
disturb them less. The ratio is the median over the turns. Copies of virtual devices take the time of the same thread, so
they are a figure of their own: on a card they run beside computations. --check asks for at most 0.75 and equal losses.""",
    {
        "--blocks": Option(1, "blocks of the backward stage"),
        "--hidden-size": Option(1536, "channels of a block; a multiple of 256"),
        "--tokens": Option(1024, "tokens of the micro-batch"),
        "--turns": Option(5, "measured steps of each side"),
    },
    measure,
    lambda figures: (
        f"{figures['kept_s']:.2f} s of processor time: {figures['ratio']:.2f} times",
        f"recomputing everything: {figures['recomputed_s']:.2f} s",
    ),
    "--blocks 1 --hidden-size 256 --tokens 16 --turns 1",
    missed_bounds,
)

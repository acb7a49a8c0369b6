"""A backward stage of dense blocks that replays what it keeps, beside one that recomputes, on this machine's processor."""

import argparse
import statistics
import time
from typing import NamedTuple

import torch

from benchmarks.frame import Benchmark, Report, in_turns, median_ratio
from benchmarks.plain_loops import LR, random_step
from torchround.config import AdamWTable, TrainingTable
from torchround.engine.device import CpuDevice, Mark, Stream
from torchround.engine.engine import Engine
from torchround.engine.reports import StageReport
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
        """Return the processor time between two marks of one thread."""
        assert isinstance(earlier, ProcessorMark), "all marks of a device are alike"
        return self._thread_s - earlier._thread_s


class ProcessorTimedDevice(CpuDevice):
    """A virtual device whose times leave out what other programs take from its thread."""

    def mark(self, stream: Stream) -> Mark:
        return ProcessorMark()


class StageTimes(NamedTuple):
    """Seconds of one step's backward stage, and the step's loss.

    `compute_s` is processor time of its computations, `clock_s` the same by the clock. `whole_s` is processor time from the
    first computation to the last, copies included.
    """

    compute_s: float
    clock_s: float
    whole_s: float
    loss: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape of the blocks and the number of turns."""
    parser.add_argument("--blocks", type=int, default=1, help="blocks of the backward stage")
    parser.add_argument(
        "--hidden-size", type=int, default=1536, help="channels of a block; a multiple of 256"
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--microbatches", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="device weights")
    parser.add_argument("--turns", type=int, default=5, help="measured steps of each side")


def measure(options: argparse.Namespace) -> Report:
    """Train both sides on the same tokens, step by step in turns."""
    size = options.hidden_size
    config = FAMILIES["llama3"].config_from_flavor(
        "debug",
        vocab_size=VOCABULARY,
        num_layers=options.blocks,
        hidden_size=size,
        ffn_size=3 * size,
        num_heads=size // HEAD_CHANNELS,
        num_kv_heads=size // HEAD_CHANNELS // QUERIES_PER_KEY,
        head_dim=HEAD_CHANNELS,
    )
    # The embedding has a stage of its own: it keeps nothing, and its backward is not what is measured.
    partition = Partition((1, options.blocks), 1, (options.blocks, 1))
    training = TrainingTable(
        seq_len=options.tokens, global_batch_size=options.microbatches, micro_batch_size=1
    )
    steps = random_step(training, VOCABULARY, torch.Generator().manual_seed(0))

    def engine(kept: KeptNames) -> Engine:
        model = FAMILIES["llama3"].build(config)
        store = HostStore(model, getattr(torch, options.dtype))
        store.initialize(model, seed=0)
        settings = EngineSettings(kept=kept)
        return Engine(
            model, store, [ProcessorTimedDevice(0)], partition, optimizer=AdamWTable(), settings=settings
        )

    def one_step(running: Engine) -> StageTimes:
        result = running.forward_backward(steps)
        running.step(LR)
        running.drain()
        [stage] = [report for report in result.reports() if is_measured(report, options.blocks)]
        spans = stage.spans
        clock_s = sum(Mark.seconds_since(span.end, span.start) for span in spans)
        return StageTimes(stage.busy_s, clock_s, spans[-1].end.seconds_since(spans[0].start), result.loss())

    with engine(((), *[KEEPABLE] * options.blocks, ())) as kept, engine(()) as recomputed:
        sides = {"kept": lambda: one_step(kept), "recomputed": lambda: one_step(recomputed)}
        found = in_turns(sides, options.turns, warm_up_turns=1)
    kept_side, full_side = found["kept"], found["recomputed"]

    def ratio(figure: str) -> float:
        pair = ([getattr(times, figure) for times in side] for side in (kept_side, full_side))
        return median_ratio(*pair)

    return {
        "losses_equal": [times.loss for times in kept_side] == [times.loss for times in full_side],
        "compute_s": {
            name: statistics.median(times.compute_s for times in side) for name, side in found.items()
        },
        "ratio": ratio("compute_s"),
        "ratio_by_the_clock": ratio("clock_s"),
        "ratio_with_copies": ratio("whole_s"),
    }


def is_measured(report: StageReport, blocks: int) -> bool:
    """Return whether the report is the blocks' backward stage."""
    stage = report.task.stage
    return stage.kind is StageKind.BACKWARD and stage.stop == blocks + 1


def missed_bounds(figures: Report) -> list[str]:
    """List each bound that was missed, one line each."""
    missed = [] if figures["losses_equal"] else ["the losses of both sides differ"]
    if figures["ratio"] > MOST_RATIO:
        missed.append(f"the stage takes {figures['ratio']:.3f} of one that recomputes, at most {MOST_RATIO}")
    return missed


def headline(figures: Report) -> tuple[str, str]:
    """Name the ratio of the stages' times, and the time of recomputation as the rival."""
    kept_s, recomputed_s = (figures["compute_s"][name] for name in ("kept", "recomputed"))
    ours = f"{kept_s:.2f} s of processor time, {figures['ratio']:.2f} times; with its copies {figures['ratio_with_copies']:.2f}"
    return ours, f"recomputing everything: {recomputed_s:.2f} s"


KEPT_STAGE = Benchmark(
    """A backward stage of dense blocks with everything kept, beside one that recomputes, on this machine's processor.

The engine trains both sides on one virtual device each, which computes with one thread, in turns. Times are those between
the engine's marks, of all micro-batches of the blocks' backward stage, in processor time of the device's thread, so that
other programs disturb them less. The ratio is the median over the turns. Copies of virtual devices take the time of the same
thread, so they are a figure of their own: on a card they run beside computations. --check asks for at most 0.75 and equal losses. Elementwise work is not kept, and PyTorch does it slowly in
bfloat16 on a processor, so the bound holds in float32. Takes about two minutes.""",
    add_options,
    measure,
    headline,
    "--blocks 1 --hidden-size 256 --tokens 16 --microbatches 1 --turns 1",
    missed_bounds,
)

"""Launches and bytes of each layer, counted from the real modules, and the step times and MFU predicted from them."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.frame import Benchmark, Report
from benchmarks.kernel_counts import Counted, CountedLayer, count_layers
from torchround.accelerators import CudaKind
from torchround.layer import MicroBatch
from torchround.models import FAMILIES

MODELS = ("llama3:3.1-8B", "qwen3:1.7B", "qwen3:4B", "qwen3:30B-A3B", "gpt_oss:20B")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class CardRates:
    """The rates that an H100 or an RTX 4090 is assumed to reach, per second, and the peak that MFU divides by.

    Models choose their kernels by the compute `capability`.
    The memory rate is about 0.85 and 0.9 of the nominal one. Products reach 0.7 and 0.9 of the peak, flash attention
    0.4 and 0.8.
    """

    name: str
    capability: tuple[int, int]
    bytes: float
    product_flops: float
    attention_flops: float
    peak_flops: float

    def seconds(self, counted: Counted) -> float:
        """Predict the time of one operation after the other, each bound by its FLOPs or by its bytes."""
        return sum(
            max(
                operation.num_bytes / self.bytes,
                operation.product_flops / self.product_flops
                + operation.attention_flops / self.attention_flops,
            )
            for operation in counted.operations
        )


CARDS = (
    CardRates("H100 SXM", (9, 0), 2.8e12, 680e12, 380e12, 989.4e12),
    CardRates("RTX 4090", (8, 9), 0.90e12, 150e12, 130e12, 165.2e12),
)


@dataclass(frozen=True)
class Goal:
    """The most that layers of a model may launch and move."""

    model: str
    layer: str
    forward_launches: int | None = None
    forward_gb: float | None = None
    backward_launches: int | None = None
    backward_gb: float | None = None
    total_gb: float | None = None


@dataclass(frozen=True)
class LeastMFU:
    """The least predicted MFU of a model on a card, if no block is computed twice."""

    model: str
    card: str
    mfu: float


GOALS = (
    Goal("qwen3:1.7B", "block", 30, 1.6, 50, 3.5),
    Goal("qwen3:1.7B", "head", total_gb=25.0),
)
LEAST_MFU = (LeastMFU("qwen3:4B", "H100 SXM", 0.50), LeastMFU("qwen3:4B", "RTX 4090", 0.60))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the models and the size of a micro-batch."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="FAMILY:FLAVOR of each model")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--documents", type=int, default=8, help="most documents of a sequence (default 8)")
    parser.add_argument(
        "--operations", type=int, default=0, help="also list this many operations of each layer"
    )


def measure(options: argparse.Namespace) -> Report:
    """Count all layers of each model and predict its micro-batch."""
    size = (options.micro_batch_size, options.seq_len)
    models = [counted_model(name, *size, options.documents) for name in options.models]
    return {"models": models, "listed_operations": options.operations}


def counted_model(name: str, batch: int, tokens: int, documents: int) -> dict[str, Any]:
    """Count one model. Layers with equal counts, as most blocks are, become one row."""
    family_name, _, flavor = name.partition(":")
    family = FAMILIES[family_name]
    model = family.build(family.config_from_flavor(flavor))
    work = [layer.work(batch, tokens, DTYPE.itemsize) for layer in model.layers]
    integers = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    counts = {}
    for card in CARDS:
        # A new one each time: it keeps what the first layer makes for all layers.
        micro_batch = MicroBatch(integers, integers, integers, integers, max_documents=documents)
        counts[card.name] = count_layers(model, micro_batch, DTYPE, CudaKind(card.capability))
    first, *others = ({"card": card.name, "layers": list(_rows(counts[card.name]))} for card in CARDS)
    customary_flops = sum(one.forward_flops + one.backward_flops for one in work)
    return {
        "model": name,
        "tokens": batch * tokens,
        "customary_flops": customary_flops,
        "layers": first["layers"],
        # Cards on which models choose other operations than on the first one.
        "others": [other for other in others if other["layers"] != first["layers"]],
        "predicted": [_predicted(card, counts[card.name], batch * tokens, customary_flops) for card in CARDS],
    }


def _rows(layers: Sequence[CountedLayer]) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[Any, ...], list[CountedLayer]] = {}
    for layer in layers:
        kind = layer.name.partition(".")[0]
        alike.setdefault((kind, *layer.forward.operations, *layer.backward.operations), []).append(layer)
    for group in alike.values():
        yield {
            "layer": group[0].name.partition(".")[0],
            "first": group[0].name,
            "count": len(group),
            "forward": _figures(group[0].forward),
            "backward": _figures(group[0].backward),
        }


def _figures(counted: Counted) -> dict[str, Any]:
    return {
        "launches": counted.launches,
        "elementwise_gb": counted.elementwise_bytes / 1e9,
        "product_gb": counted.product_bytes / 1e9,
        "product_tflop": counted.product_flops / 1e12,
        "attention_tflop": counted.attention_flops / 1e12,
        "operations": {
            name: [launches, traffic / 1e9] for name, (launches, traffic) in counted.by_name().items()
        },
    }


def _predicted(
    card: CardRates, layers: Sequence[CountedLayer], num_tokens: int, customary_flops: float
) -> dict[str, Any]:
    """Predict a micro-batch's time. The layer with the loss is never recomputed: its stage is the fused one."""
    forwards = [card.seconds(layer.forward) for layer in layers]
    backward_s = sum(card.seconds(layer.backward) for layer in layers)
    once_s, twice_s = sum(forwards) + backward_s, 2 * sum(forwards[:-1]) + forwards[-1] + backward_s
    return {
        "card": card.name,
        "block_forward_ms": 1e3 * forwards[1],
        "block_backward_ms": 1e3 * card.seconds(layers[1].backward),
        "head_ms": 1e3 * (forwards[-1] + card.seconds(layers[-1].backward)),
        "micro_batch_ms": 1e3 * once_s,
        "tokens_per_s": num_tokens / once_s,
        "mfu": customary_flops / once_s / card.peak_flops,
        "recomputed_micro_batch_ms": 1e3 * twice_s,
        "recomputed_tokens_per_s": num_tokens / twice_s,
        "recomputed_mfu": customary_flops / twice_s / card.peak_flops,
    }


# Goals.


def missed_goals(figures: Report) -> list[str]:
    """List each goal that a counted model misses."""
    missed = []
    for found in figures["models"]:
        for row in found["layers"]:
            for goal in GOALS:
                if (goal.model, goal.layer) == (found["model"], row["layer"]):
                    missed += _missed(goal, row["forward"], row["backward"])
        for predicted in found["predicted"]:
            for least in LEAST_MFU:
                named = (least.model, least.card) == (found["model"], predicted["card"])
                if named and predicted["mfu"] < least.mfu:
                    mfu = f"predicted MFU {predicted['mfu']:.3f}, goal {least.mfu}"
                    missed.append(f"{least.model} on {least.card}: {mfu}")
    return missed


def _missed(goal: Goal, forward: dict[str, Any], backward: dict[str, Any]) -> Iterator[str]:
    total_gb = sum(part["elementwise_gb"] + part["product_gb"] for part in (forward, backward))
    for what, value, most in (
        ("launches of a forward", forward["launches"], goal.forward_launches),
        ("elementwise GB of a forward", forward["elementwise_gb"], goal.forward_gb),
        ("launches of a backward", backward["launches"], goal.backward_launches),
        ("elementwise GB of a backward", backward["elementwise_gb"], goal.backward_gb),
        ("GB of forward and backward", total_gb, goal.total_gb),
    ):
        if most is not None and value > most:
            yield f"{goal.model} {goal.layer}: {value:.4g} {what}, goal {most}"


# Output.

ASSUMPTIONS = (
    (
        "Counted, not measured, for layers that are not compiled: each operation is one launch, reads its tensors and writes its results once. Sorting, "
        "scans and the backward of flash attention launch several kernels each; they count as one."
    ),
    (
        "An operation takes the longer of its bytes and its FLOPs at the rates below. Launches, gaps between kernels, "
        "transfers and the optimizer take no time."
    ),
    (
        "Attention is causal over sequences that are one document each, the longest case. "
        "MFU divides the customary FLOPs (all T^2 pairs, nothing recomputed) by the card's dense peak."
    ),
    *(
        f"{card.name}: {card.bytes / 1e12:.2f} TB/s, products {card.product_flops / 1e12:.0f}, "
        f"attention {card.attention_flops / 1e12:.0f}, peak {card.peak_flops / 1e12:.1f} TFLOP/s."
        for card in CARDS
    ),
)


def tables_of(report: Report) -> str:
    """Format the counts and the predictions as two tables, with the assumptions below."""
    counts, predictions = Table(title="counted", box=SIMPLE_HEAD), Table(title="predicted", box=SIMPLE_HEAD)
    counts.add_column("model")
    counts.add_column("layer")
    for column in ("pass", "launches", "elementwise GB", "product GB", "product TFLOP", "attention TFLOP"):
        counts.add_column(column, justify="right")
    predictions.add_column("model")
    predictions.add_column("card")
    for column in ("block ms", "head ms", "micro-batch ms", "tokens/s", "MFU", "recomputed ms", "MFU"):
        predictions.add_column(column, justify="right")
    for found in report["models"]:
        for part in (found, *found["others"]):
            name = part.get("model") or f"  on {part['card']}"
            for row in part["layers"]:
                for way in ("forward", "backward"):
                    if row[way]["launches"]:
                        counts.add_row(name, f"{row['count']} {row['layer']}", way, *_cells(row[way]))
        for guess in found["predicted"]:
            predictions.add_row(found["model"], guess["card"], *_prediction_cells(guess))
    text = StringIO()
    console = Console(file=text, width=None if sys.stdout.isatty() else 120)
    console.print(counts)
    for found in report["models"]:
        for row in found["layers"]:
            for way in ("forward", "backward"):
                _list_operations(console, f"{found['model']} {row['first']} {way}", row[way], report)
    console.print(predictions)
    for line in (*ASSUMPTIONS, *report["missed_bounds"]):
        console.print(line, highlight=False)
    return text.getvalue().rstrip()


def _list_operations(console: Console, title: str, figures: dict[str, Any], report: Report) -> None:
    """Print the operations with the most traffic, as many as were asked for."""
    listed = list(figures["operations"].items())[: report["listed_operations"]]
    for name, (launches, gb) in listed:
        console.print(f"{title:36} {name:40} {launches:5} launches {gb:8.3f} GB", highlight=False)


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        f"{figures['launches']}",
        f"{figures['elementwise_gb']:.2f}",
        f"{figures['product_gb']:.2f}",
        f"{figures['product_tflop']:.3f}",
        f"{figures['attention_tflop']:.3f}",
    ]


def _prediction_cells(guess: dict[str, Any]) -> list[str]:
    return [
        f"{guess['block_forward_ms']:.2f} + {guess['block_backward_ms']:.2f}",
        f"{guess['head_ms']:.1f}",
        f"{guess['micro_batch_ms']:.0f}",
        f"{guess['tokens_per_s']:.0f}",
        f"{guess['mfu']:.3f}",
        f"{guess['recomputed_micro_batch_ms']:.0f}",
        f"{guess['recomputed_mfu']:.3f}",
    ]


def headline(figures: Report) -> tuple[str, str]:
    """Name the first block's counts of the first model, and its predicted MFU."""
    found = figures["models"][0]
    block = next(row for row in found["layers"] if row["layer"] == "block")
    forward, backward = block["forward"], block["backward"]
    return (
        (
            f"{found['model']}, a block: {forward['launches']} launches and {forward['elementwise_gb']:.2f} GB forward, "
            f"{backward['launches']} and {backward['elementwise_gb']:.2f} GB backward"
        ),
        "predicted, not measured: MFU "
        + ", ".join(f"{guess['mfu']:.2f} ({guess['card']})" for guess in found["predicted"]),
    )


KERNELS = Benchmark(
    """Launches, bytes and FLOPs of each layer, counted on meta, and the MFU predicted from them. No device is used.

--check asks for the goals: few launches and bytes of Qwen3 1.7B's blocks and head, and the predicted MFU of 4B.""",
    add_options,
    measure,
    headline,
    "--models qwen3:debug_moe --seq-len 64",
    missed_goals,
    show=tables_of,
)

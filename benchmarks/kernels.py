"""Launches, bytes and FLOPs of each layer, counted on `meta`, and the step times and MFU predicted from them.

The real modules run, bound and called as the engine does, and a dispatch mode sees each operation; no device is used. An
operation counts as one launch. It reads each tensor that it takes and writes each tensor that it makes or changes, once.

Shapes: N tokens of a micro-batch, H heads, C channels of a head, R rows of experts, A inputs, Z outputs.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.frame import Benchmark, Option, Report, table
from torchround.accelerators import AcceleratorKind, CudaKind, as_if_on
from torchround.engine.store.bundles import collect_bundles
from torchround.engine.worker.compute import StageComputation, bind
from torchround.engine.worker.slots import DeviceSlot, StageLayout, UnpackedLayer, flatten, unflatten
from torchround.layer import Hidden, LayeredModel, MicroBatch
from torchround.models import FAMILIES
from torchround.models.borrowed import construction
from torchround.models.borrowed.counted_work import fake_parameters, no_memory
from torchround.optim import NO_STATE

MODELS = ["llama3:3.1-8B", "qwen3:1.7B", "qwen3:4B", "qwen3:30B-A3B", "gpt_oss:20B"]
# Types of decoders of `transformers`, counted at the sizes that their configs have by default.
BORROWED = ["mistral", "gemma3_text", "qwen3_5_text", "qwen3_next", "glm4_moe", "deepseek_v3"]
# As many blocks as have one of each kind in all of these.
BORROWED_BLOCKS = 6
DTYPE = torch.bfloat16

# They make a tensor and write nothing.
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "set_"}
# They take a tensor for its shape, or overwrite it: the values are not read.
UNREAD = {"zeros_like", "ones_like", "full_like", "rand_like", "new_zeros", "new_ones", "new_full"}
OVERWRITING = {"copy_", "fill_", "zero_", "uniform_", "normal_"}
# They read the chosen rows of their first tensor, which are as large as the result.
GATHERS = {"index", "gather", "embedding", "index_select"}
# They change the chosen rows of their first tensor, which are as large as their last one.
SCATTERS = {
    *("scatter", "scatter_", "scatter_add_"),
    *("index_put_", "_index_put_impl_", "index_add_", "index_copy_"),
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_scaled_mm"}
# Of rows with their expert's matrix, and of rows with gradients to the sum of a stack's gradients.
OWN_PRODUCTS = {"torchround::grouped_rows", "torchround::grouped_gradient_"}


@dataclass(frozen=True)
class Operation:
    """One call of an operation. `product_flops` are matrix products', `attention_flops` flash attention's."""

    name: str
    num_bytes: int
    product_flops: float = 0.0
    attention_flops: float = 0.0


@dataclass
class Counted:
    """The operations of one pass over one layer."""

    operations: list[Operation] = field(default_factory=list)

    @property
    def launches(self) -> int:
        return len(self.operations)

    @property
    def num_bytes(self) -> int:
        return sum(operation.num_bytes for operation in self.operations)

    @property
    def elementwise_bytes(self) -> int:
        """The traffic of operations that do no product, and so cost nothing else."""
        return sum(
            operation.num_bytes
            for operation in self.operations
            if not operation.product_flops and not operation.attention_flops
        )

    @property
    def attention_flops(self) -> float:
        return sum(operation.attention_flops for operation in self.operations)


@dataclass(frozen=True)
class CountedLayer:
    """A layer's forward with everything that its backward needs, and its backward.

    The last layer's stage runs both in one go, and all of it counts as its forward.
    """

    name: str
    forward: Counted
    backward: Counted


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
COUNTED = (
    *("forward launches", "forward elementwise GB"),
    *("backward launches", "backward elementwise GB", "GB"),
)
# By model and layer, the most of each figure.
GOALS: dict[tuple[str, str], dict[str, float]] = {("qwen3:1.7B", "head"): {"GB": 25.0}}


def measure(options: argparse.Namespace) -> Report:
    """Count all layers of each model and predict its micro-batch."""
    size = (options.micro_batch_size, options.seq_len)
    borrowed = [row for name in options.borrowed for row in counted_blocks(name, *size, options.documents)]
    return {
        "models": [counted_model(name, *size, options.documents) for name in options.models],
        "borrowed": borrowed,
    }


def counted_blocks(model_type: str, batch: int, tokens: int, documents: int) -> list[dict[str, Any]]:
    """Count each kind of block of a decoder of `transformers`, by its own code and with parts of ours.

    Blocks that run document by document are left out: their code is the same both ways.
    """
    from transformers import AutoConfig

    family, card = FAMILIES["transformers"], CARDS[0]
    content = AutoConfig.for_model(model_type, num_hidden_layers=BORROWED_BLOCKS).to_dict()
    rows = []
    for parts in ("of transformers", "of ours"):
        kept = patch(f"{construction.__name__}.recognise", lambda body, *_: (body, ()))
        with kept if parts == "of transformers" else nullcontext():
            model = family.build(family.config_from_hf(content))
        layers = []
        with as_if_on(CudaKind(card.capability)):
            for name, layer in zip(model.names[1:-1], model.layers[1:-1], strict=True):
                if not layer.alone:
                    layers.append(_counted_block(name, layer, batch, tokens, documents))
        rows += [{"model": model_type, "parts": parts, **row} for row in _rows(layers)]
    return rows


def _counted_block(name: str, layer: Any, batch: int, tokens: int, documents: int) -> CountedLayer:
    """Count a block on tensors without memory, which know positions: masks of `transformers` depend on them."""
    positions = torch.arange(tokens).remainder(-(-tokens // documents)).expand(batch, -1).contiguous()
    with no_memory():
        ids = torch.zeros((batch, tokens), dtype=torch.int64)
        micro_batch = MicroBatch(ids, ids, positions, ids, max_documents=documents)
        weights = fake_parameters(layer, DTYPE)
        for weight in weights.values():
            if weight.requires_grad:
                weight.grad_dtype, weight.grad = torch.float32, torch.empty(weight.shape)
        hidden = torch.empty((batch, tokens, layer.width), dtype=DTYPE).requires_grad_()
        layer.shell.calls_of(hidden, micro_batch)  # once for all blocks
        with CountingMode() as mode:
            output = torch.func.functional_call(layer, weights, (hidden, micro_batch))
            forward, mode.counted = mode.counted, Counted()
            torch.autograd.backward(output, torch.empty_like(output))
    return CountedLayer(name, forward, mode.counted)


def counted_model(name: str, batch: int, tokens: int, documents: int) -> dict[str, Any]:
    """Count one model on each card. Layers with equal counts, as most blocks are, become one row."""
    family_name, _, flavor = name.partition(":")
    family = FAMILIES[family_name]
    model = family.build(family.config_from_flavor(flavor))
    work = [layer.work(batch, tokens, DTYPE.itemsize) for layer in model.layers]
    customary_flops = sum(one.forward_flops + one.backward_flops for one in work)
    integers = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    cards = {}
    for card in CARDS:
        # A new one each time: it keeps what the first layer makes for all layers.
        micro_batch = MicroBatch(integers, integers, integers, integers, max_documents=documents)
        layers = count_layers(model, micro_batch, DTYPE, CudaKind(card.capability))
        cards[card.name] = {
            "layers": list(_rows(layers)),
            "predicted": _predicted(card, layers, batch * tokens, customary_flops),
        }
    return {"model": name, "tokens": batch * tokens, "customary_flops": customary_flops, "cards": cards}


def _rows(layers: Sequence[CountedLayer]) -> Iterator[dict[str, Any]]:
    alike: dict[tuple[Any, ...], list[CountedLayer]] = {}
    for layer in layers:
        kind = layer.name.partition(".")[0]
        alike.setdefault((kind, *layer.forward.operations, *layer.backward.operations), []).append(layer)
    for (kind, *_), group in alike.items():
        forward, backward = group[0].forward, group[0].backward
        yield {
            "layers": f"{len(group)} {kind}",
            "layer": kind,
            "forward launches": forward.launches,
            "forward elementwise GB": forward.elementwise_bytes / 1e9,
            "backward launches": backward.launches,
            "backward elementwise GB": backward.elementwise_bytes / 1e9,
            "GB": (forward.num_bytes + backward.num_bytes) / 1e9,
        }


def _predicted(
    card: CardRates, layers: Sequence[CountedLayer], num_tokens: int, customary_flops: float
) -> dict[str, float]:
    """Predict a micro-batch's time. The layer with the loss is never recomputed: its stage is the fused one."""
    forwards = [card.seconds(layer.forward) for layer in layers]
    once_s = sum(forwards) + sum(card.seconds(layer.backward) for layer in layers)
    twice_s = once_s + sum(forwards[:-1])
    return {
        "micro_batch_ms": 1e3 * once_s,
        "tokens_per_s": num_tokens / once_s,
        "mfu": customary_flops / once_s / card.peak_flops,
        "recomputed_mfu": customary_flops / twice_s / card.peak_flops,
    }


def missed_goals(figures: Report) -> list[str]:
    """List each goal that a counted model misses. The counts are those on the first card."""
    missed = []
    for found in figures["models"]:
        for row in found["cards"][CARDS[0].name]["layers"]:
            goals = GOALS.get((found["model"], row["layer"]), {})
            missed += [
                f"{found['model']} {row['layer']}: {row[what]:.4g} {what}, at most {most}"
                for what, most in goals.items()
                if row[what] > most
            ]
    return missed


def tables_of(report: Report) -> str:
    """Format the counts, the predictions and the assumed rates."""
    counts, guesses = [], []
    for found in report["models"]:
        for card, of_card in found["cards"].items():
            name = f"{found['model']}, {card}"
            counts += [
                [name, row["layers"], *(f"{row[what]:.4g}" for what in COUNTED)] for row in of_card["layers"]
            ]
            guesses.append([name, *(f"{guess:.5g}" for guess in of_card["predicted"].values())])
    rates = [
        f"{card.name}: {card.bytes / 1e12:.2f} TB/s, products {card.product_flops / 1e12:.0f}, "
        f"attention {card.attention_flops / 1e12:.0f}, peak {card.peak_flops / 1e12:.1f} TFLOP/s."
        for card in CARDS
    ]
    tables = [
        table(["counted", "layers", *COUNTED], counts),
        table(
            ["counted, H100", "parts", "layers", *COUNTED],
            [
                [row["model"], row["parts"], row["layers"], *(f"{row[what]:.4g}" for what in COUNTED)]
                for row in report["borrowed"]
            ],
        ),
        table(["predicted", "ms", "tokens/s", "MFU", "MFU, blocks computed twice"], guesses),
    ]
    return "\n".join([*tables, *rates, *report["missed_bounds"]])


def headline(figures: Report) -> tuple[str, str]:
    """Name the first block's counts of the first model, and its predicted MFU."""
    found = figures["models"][0]
    block = next(row for row in found["cards"][CARDS[0].name]["layers"] if row["layer"] == "block")
    counts = ", ".join(f"{block[what]:.3g} {what}" for what in COUNTED)
    guesses = ", ".join(
        f"{of_card['predicted']['mfu']:.2f} ({card})" for card, of_card in found["cards"].items()
    )
    return f"{found['model']}, a block: {counts}", f"predicted, not measured: MFU {guesses}"


KERNELS = Benchmark(
    """Launches, bytes and FLOPs of each layer, counted on meta, and the MFU predicted from them. No device is used.

Layers are counted as they run uncompiled. In a run blocks are compiled, and need less. Each operation is one launch;
sorting, scans and the backward of flash attention launch several kernels each, and count as one. An operation takes the
longer of its bytes and its FLOPs at assumed rates. Launches, gaps, transfers and the optimizer take no time. Attention is
causal over sequences that are one document each, the longest case. MFU divides the customary FLOPs (all T^2 pairs, nothing
recomputed) by the card's dense peak. --check asks for few bytes of Qwen3 1.7B's head.""",
    {
        "--models": Option(MODELS, "FAMILY:FLAVOR of each model"),
        "--borrowed": Option(BORROWED, "types of decoders of transformers"),
        "--micro-batch-size": Option(4, "sequences of a micro-batch"),
        "--seq-len": Option(2048, "tokens of a sequence"),
        "--documents": Option(8, "most documents of a sequence"),
    },
    measure,
    headline,
    "--models qwen3:debug_moe --borrowed mistral --seq-len 64",
    missed_goals,
    show=tables_of,
)


# Counting.


class CountingMode(TorchDispatchMode):
    """A dispatch mode that adds each operation below autograd to `counted`."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inside = _HIDES_SEVERAL.get(func.name().partition(".")[0])
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        operation = _operation(func, args, kwargs or {}, out)
        if operation is not None:
            self.counted.operations.append(operation)
        return out


def _lookup_gradient(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad.float(), index, num_rows, -1, False)


# Operations of ours that are whole only to a compiler. They launch what their plain code launches.
_HIDES_SEVERAL: dict[str, Callable[..., Any]] = {"torchround::lookup_gradient": _lookup_gradient}


def _operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operation | None:
    """Count what a call costs, or None if it launches nothing."""
    space, _, overload = func.name().partition("::")
    name = overload.partition(".")[0]
    if func.is_view or name in UNWRITTEN or space == "prim":  # which asks a tensor for its device
        return None
    if name == "copy_" and _memory(args[0]) == _memory(args[1]):
        return None  # PyTorch returns early: `a[rows] += b` copies a[rows] onto itself afterwards
    reads, writes = _traffic(func, args, kwargs, out)
    if space == "aten" and name in GATHERS:
        made = sum(_num_bytes(tensor) for tensor in writes)
        return Operation(name, 2 * made + sum(_num_bytes(tensor) for tensor in reads[1:]))
    if space == "aten" and name in SCATTERS:
        given = sum(_num_bytes(tensor) for tensor in reads[1:])
        changed = _num_bytes(reads[-1]) * (2 if "add" in name else 1)
        return Operation(name, given + changed)
    num_bytes = sum(_num_bytes(tensor) for tensor in (*reads, *writes))
    if space == "aten" and name in PRODUCTS:
        return Operation(name, num_bytes, product_flops=_product_flops(args, writes[0]))
    if func.name() in OWN_PRODUCTS:
        return Operation(
            func.name(), num_bytes, product_flops=_product_flops(_grouped_factors(*args), writes[0])
        )
    if "attention" in name and space == "aten":
        return Operation(name, num_bytes, attention_flops=_attention_flops(func, args, kwargs))
    return Operation(name if space == "aten" else func.name(), num_bytes)


def _traffic(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """List the tensors that a call reads and those that it writes, each piece of memory once."""
    name = func.name().partition("::")[2].partition(".")[0]
    reads, writes = [], []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        tensors = _tensors(given.get(argument.name))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed:
            writes += tensors
        if not argument.is_out and name not in UNREAD and not (changed and name in OVERWRITING):
            reads += tensors
    if not writes:
        writes = _tensors(out)
    else:  # an operation that changes one argument may return others that are new
        known = {_memory(tensor) for tensor in writes}
        writes += [tensor for tensor in _tensors(out) if _memory(tensor) not in known]
    return _distinct(reads), _distinct(writes)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({_memory(tensor): tensor for tensor in tensors}.values())


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _num_bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor's distinct elements: a broadcast dimension is in memory once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size > 0 else size
    return elements * tensor.element_size()


def _product_flops(args: tuple[Any, ...], result: Tensor) -> float:
    """Count 2 FLOPs for each multiply-add. Grouped products have R rows in all, so one factor has no group."""
    first, second = [value for value in args if isinstance(value, Tensor) and value.dim() >= 2][-2:]
    if first.dim() == second.dim() == 2 and result.dim() == 3:  # [A, R] x [R, Z] by groups of R -> [E, A, Z]
        return 2.0 * first.shape[0] * first.shape[1] * second.shape[1]
    return 2.0 * result.numel() * first.shape[-1]


def _grouped_factors(first: Tensor, second: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    """Order the factors as `grouped_mm` takes them: rows with gradients have the rows of the first one transposed."""
    return (first, second) if second.dim() == 3 else (first.T, second)


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Count the FLOPs of causal pairs inside the window, of sequences that are one document each.

    The kernel skips all other blocks. Its backward recomputes the scores and makes four products: 2.5 forwards.
    """
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, tokens = given["query"], given.get("max_q")
    if tokens is None:  # [B, H, T, C]
        num_tokens, heads, tokens, channels = query.shape[0] * query.shape[2], *query.shape[1:]
    else:  # [N, H, C]
        num_tokens, heads, channels = query.shape
    left = given.get("window_size_left", -1)
    window = tokens if left is None or left < 0 else min(left + 1, tokens)
    pairs_of_one = window * (window + 1) / 2 + (tokens - window) * window
    flops = 4.0 * heads * channels * pairs_of_one * num_tokens / tokens
    return 2.5 * flops if "backward" in func.name() else flops


def count_layers(
    model: LayeredModel,
    micro_batch: MicroBatch,
    dtype: torch.dtype,
    kind: AcceleratorKind,
) -> list[CountedLayer]:
    """Count each layer in order, with the operations that it chooses on a kind of accelerator.

    The micro-batch is on `meta`; `max_documents` is a number, as in a run.
    """
    bundles, locations = collect_bundles(model, {}, NO_STATE, element_bytes=2)
    store = SimpleNamespace(
        bundles=bundles,
        locations=locations,
        layer_bundles=lambda layer: [
            bundles[i] for i in dict.fromkeys(place.bundle for place in locations[layer])
        ],
    )
    counted: list[CountedLayer] = []
    hidden: Hidden | None = None
    with as_if_on(kind):
        for index, name in enumerate(model.names):
            layout = StageLayout(store, range(index, index + 1))  # type: ignore[arg-type]
            slots = (
                DeviceSlot(torch.empty(layout.weight_numel, dtype=dtype, device="meta")),
                DeviceSlot(torch.empty(layout.gradient_numel, dtype=torch.float32, device="meta")),
            )
            unpacked = UnpackedLayer(torch.empty(0))
            layers = bind(store, list(model.layers), layout, *slots, {}, unpacked)  # type: ignore[arg-type]
            with CountingMode() as mode:
                if index == len(model.layers) - 1:
                    run = StageComputation(layers, {index: hidden}, micro_batch, index, loss_factor=0.5)
                    run.backward((), index)
                    counted.append(CountedLayer(name, mode.counted, Counted()))
                    break
                run = StageComputation(layers, {index: hidden}, micro_batch, graphs_from=index)
                outputs, structure = flatten(run.run_to(index + 1))
                forward, mode.counted = mode.counted, Counted()
                hidden = unflatten([part.detach() for part in outputs], structure)
                run.backward([torch.empty_like(part) for part in outputs], index)
            counted.append(CountedLayer(name, forward, mode.counted))
    return counted

"""Experts: rows of tokens sorted by expert, and the stacks of matrices that they are multiplied with.

Sorting is a permutation of (token, choice) pairs. It happens on the tokens' device without waiting for it, and every
backward is a gather: no atomic additions, so equal runs give equal bits.

A row's routing weight is applied before the projection down, where rows are narrow, so no expert output has to be
kept for the backward.

Shapes: N tokens of the micro-batch, D model width, E experts, k experts per token, R = N k rows sorted by expert,
F expert width; of an adapter A inputs, Z outputs, r rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchround.accelerators import PLANNED_KIND
from torchround.keeping import joined, keep, passing
from torchround.layer import KeptWork, LayerWork, Products
from torchround.models.common.lora import Adaptable, LoraShape
from torchround.models.common.primitives import gated_product, init_part_
from torchround.models.kernels.grouped import PackedStack, RowGroups, packed_product, stack_product
from torchround.packed_formats import UNIT, PackedFormat

# Of values, places and k: the values in another order.
Move = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Routes(RowGroups):
    """The rows' order: sorted by expert. All tensors are int64 except `ends`.

    - `ends [E]` int32: one past each expert's last row. An expert without rows has its predecessor's end.
    - `pairs [R]`: the (token, choice) pair `token * k + choice` in each row.
    - `rows [R]`: the row of each pair, the inverse permutation.
    - `experts [R]`: the expert of each row.
    """

    pairs: Tensor
    rows: Tensor
    experts: Tensor
    choices: int


def make_routes(chosen: Tensor, num_experts: int) -> Routes:
    """Sort the pairs by the experts `chosen [N, k]` for each token. Pairs of one expert stay in token order."""
    experts, pairs = chosen.flatten().sort(stable=True)  # [N, k] -> [R]
    rows = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    every = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    return Routes(ends, pairs, rows, experts, chosen.shape[1])


def dispatch(tokens: Tensor, routes: Routes) -> Tensor:
    """Copy each token of `[N, D]` to the rows of its k experts, `[R, D]`."""
    return _Moved.apply(tokens, routes.pairs, routes.rows, routes.choices, _spread, _gather_sums)


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """Add up each token's k rows of `[R, D]` in fp32, to `[N, D]`."""
    return _Moved.apply(rows, routes.rows, routes.pairs, routes.choices, _gather_sums, _spread)


def sort_pairs(values: Tensor, routes: Routes) -> Tensor:
    """Bring one number per pair, `[N, k]`, into the order of the rows, `[R]`."""
    return _Moved.apply(values.flatten(), routes.pairs, routes.rows, routes.choices, _take, _take)


class ExpertStack(Adaptable, ABC):
    """The E feed-forwards of one block, each `adaptable` matrix stored as one stack; adapters are optional.

    Each expert has an adapter of its own, `<name>_lora_a` and `<name>_lora_b` beside the stack `<name>`. They have PEFT's
    shapes unless a family says otherwise: `[E r, A]` with rows expert by expert, `[Z, r E]` with columns rank by rank. On
    accelerators a rank that 8 does not divide takes the loop over experts.
    """

    ffn_size: int
    # The stacks that are packed wherever the parameter has bytes. A tuple as `shapes`.
    packed: tuple[tuple[str, PackedStack], ...] = ()

    @abstractmethod
    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        """Map rows `[R, D]` and their routing weights `[R]` fp32 to weighted outputs `[R, D]`."""

    init_weights = init_part_

    def matrix(self, stack: Tensor) -> Tensor:
        """View a stack, or the gradient of one, as `[E, A, Z]`."""
        return stack if self.inputs_first else stack.transpose(1, 2)

    def inward(self, a: Tensor) -> Tensor:
        """View the adapters `<name>_lora_a`, or their gradient, as `[E, A, r]`."""
        return a.unflatten(0, (self._num_experts(), -1)).transpose(1, 2)  # [E r, A] -> [E, r, A] -> [E, A, r]

    def outward(self, b: Tensor) -> Tensor:
        """View the adapters `<name>_lora_b`, or their gradient, as `[E, r, Z]`."""
        return b.unflatten(1, (-1, self._num_experts())).permute(
            2, 1, 0
        )  # [Z, r E] -> [Z, r, E] -> [E, r, Z]

    def adapter_shapes(self, name: str, lora: LoraShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        num_experts, inputs, outputs = self.matrix(getattr(self, name)).shape
        return (num_experts * lora.rank, inputs), (outputs, lora.rank * num_experts)

    def _num_experts(self) -> int:
        stack = getattr(self, self.adaptable[0])
        return dict(self.packed)[self.adaptable[0]].shape[0] if stack.dtype == torch.uint8 else len(stack)

    def product(self, name: str, rows: Tensor, routes: Routes) -> Tensor:
        """Multiply each row with its expert's matrix `name`, and add the adapter's product if there is one."""
        if self.lora is None or name not in self.adapted:
            return self._base_product(name, rows, routes)
        plain = passing(self._base_product, name, rows, routes)
        a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
        # Each of the module's adapters draws another mask, counted from 1.
        dropped = self.drop(rows, use=1 + list(self.adapted).index(name))
        low = stack_product(dropped, a, self.inward, routes)  # [R, r]
        adapted = passing(stack_product, low, b, self.outward, routes)
        return joined(torch.add, plain, adapted * self.adapted[name].scale)

    def _base_product(self, name: str, rows: Tensor, routes: Routes) -> Tensor:
        stack = getattr(self, name)
        if stack.dtype == torch.uint8:
            # Compiled layers have whole stacks. The backward needs the same experts, which are there by then.
            if not torch.compiler.is_dynamo_compiling() and hasattr(stack, "fetch"):
                stack.fetch(routes.bounds)
            return packed_product(rows, stack, dict(self.packed)[name], routes, self.inputs_first)
        return stack_product(rows, stack, self.matrix, routes)

    def stays_packed(self, name: str, packed: PackedFormat) -> bool:
        if name not in self.adaptable or getattr(self, name)[0].numel() % UNIT:
            return False
        shape = tuple(getattr(self, name).shape)
        self.packed = tuple((dict(self.packed) | {name: PackedStack(packed, shape)}).items())
        return True

    def work(self, num_rows: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count the products of `num_rows` rows, and what the backward needs besides the rows themselves.

        Those are gate, up and their product (3 F elements a row), the output of each adapter's A, and with dropout the
        adapter's input and mask. The scratch holds the gradients of all of these, so it has the same size.
        """
        stacks = [getattr(self, name) for name in self.adaptable]
        frozen_row_flops = 2.0 * sum(stack[0].numel() for stack in stacks if not stack.requires_grad)
        row_elements = 3 * self.ffn_size
        for name, lora in self.adapted.items():
            inputs = self.matrix(getattr(self, name)).shape[1]
            row_elements += lora.rank + (inputs + 1 if lora.dropout else 0)
        kept_bytes = num_rows * row_elements * element_bytes
        inward = [name for name in self.adaptable if name != "down"]
        parts = []
        # The backward does not need the outputs of the projection down.
        for part, names, saves_results in (("gate_up", inward, True), ("down", ["down"], False)):
            widths, ranks, row_flops = [], [], 0.0
            for name in names:
                matrix = self.matrix(getattr(self, name))
                widths.append(matrix.shape[2])
                row_flops += 2.0 * matrix[0].numel()
                if name in self.adapted:
                    ranks.append(self.adapted[name].rank)
                    row_flops += 2.0 * ranks[-1] * (matrix.shape[1] + matrix.shape[2])
            sizes = [num_rows * width * element_bytes for width in (*ranks, *widths)]
            saved_bytes = num_rows * (sum(ranks) + (sum(widths) if saves_results else 0)) * element_bytes
            parts.append(KeptWork.of(part, sizes, num_rows * row_flops, saved_bytes, "grouped"))
        products = Products(sum(part.flops for part in parts), num_rows * frozen_row_flops, "grouped")
        return LayerWork((products,), kept_bytes, 0, kept_bytes, tuple(parts))

    def activation_scratch_bytes(self, num_rows: int, element_bytes: int, device: str) -> int:
        """Count what the activation's backward needs besides gate, up, their product and the gradients of these."""
        return 0


class GatedExperts(ExpertStack):
    """`down_e(silu(gate_e(row)) * up_e(row) * weight)` for each row of expert e; no biases.

    Stacks and adapters have outputs first, `[E, Z, A]`: `<name>_lora_a [E, r, A]`, `<name>_lora_b [E, Z, r]`.
    """

    adaptable = ("gate", "up", "down")

    def __init__(self, hidden_size: int, num_experts: int, ffn_size: int) -> None:
        super().__init__()
        self.ffn_size = ffn_size
        inward, outward = (num_experts, ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        self.gate = nn.Parameter(torch.empty(inward, device="meta"))
        self.up = nn.Parameter(torch.empty(inward, device="meta"))
        self.down = nn.Parameter(torch.empty(outward, device="meta"))

    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        gate, up = keep("gate_up", self._gate_up, rows, routes)  # [R, F]
        product = gated_product(gate, up, weights)
        return keep("down", self.product, "down", product, routes)

    def _gate_up(self, rows: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        return self.product("gate", rows, routes), self.product("up", rows, routes)

    def inward(self, a: Tensor) -> Tensor:
        return a.transpose(1, 2)

    def outward(self, b: Tensor) -> Tensor:
        return b.transpose(1, 2)

    def adapter_shapes(self, name: str, lora: LoraShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        num_experts, outputs, inputs = getattr(self, name).shape
        return (num_experts, lora.rank, inputs), (num_experts, outputs, lora.rank)


def _spread(tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
    return tokens[pairs // choices]  # [N, D] -> [R, D]


def _gather_sums(sorted_rows: Tensor, rows: Tensor, choices: int) -> Tensor:
    by_token = sorted_rows[rows].unflatten(0, (-1, choices))  # [R, D] -> [N, k, D]
    return by_token.sum(dim=1, dtype=torch.float32).to(sorted_rows.dtype)


def _take(values: Tensor, places: Tensor, _: int) -> Tensor:
    return values[places]


class _Moved(torch.autograd.Function):
    """`move` by `places`, and `back` by their inverse: a gather too, so that nothing is scattered."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, places: Tensor, inverse: Tensor, choices: int, move: Move, back: Move
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices, ctx.back = choices, back
        return move(values, places, choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], *ctx.saved_tensors, ctx.choices), None, None, None, None, None

"""Feed-forwards of long micro-batches, computed in chunks of tokens; and fp32 work on rows, in slices of rows.

A feed-forward works token by token. What it makes inside is several times as large as its input: 58 times in a block of
Qwen3-235B. A micro-batch of more than `CHUNK_TOKENS` tokens therefore goes through it chunk by chunk. The forward
keeps the input alone. The backward computes each chunk once more, right before it differentiates the chunk.

The gradient of a weight is the sum over chunks, in their order. Each is added to the sum that the engine holds, as
that of a micro-batch is. Chunks have a fixed number of tokens, so bits depend on neither machine nor plan.

Shapes: N tokens of the micro-batch, D model width.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchround.accelerators import is_accelerator
from torchround.keeping import rest_of_replay
from torchround.layer import LayerWork
from torchround.models.common.lora import Adaptable
from torchround.models.kernels.operation import uses_fused

# As many as a usual micro-batch has, which is then computed at once. Fewer would be a recomputation for nothing, more would
# shorten the longest sequence: an expert block of Qwen3-235B takes 0.45 MB for each token of a chunk.
CHUNK_TOKENS = 8192

# 128 MiB in fp32. Smaller slices would take a card little more time than their kernels take to launch.
SLICE_ELEMENTS = 1 << 25


def in_chunks(
    module: nn.Module, function: Callable[..., Tensor], *inputs: Tensor, is_read: bool = True
) -> Tensor:
    """Compute `function(*inputs)`, `[N, D]`, for at most `CHUNK_TOKENS` rows at once.

    Each of the inputs is `[N, ...]`, the first one `[N, D]`. A row of the result depends on the same row of each input
    and on the parameters of `module`. With more than one chunk the backward adds to the parameters' `grad`, so
    `torch.autograd.grad` finds no gradient for them; `function` must hold the last parts of its layer that are kept.

    Unless the result `is_read`, only its gradient is wanted, and several chunks give zeros.
    """
    if len(inputs[0]) <= CHUNK_TOKENS:
        return function(*inputs)
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return _InChunks.apply(_Run(module, function, len(inputs), is_read), *inputs, *trained)


def work_in_chunks(work_of: Callable[[int], LayerWork], num_tokens: int, row_bytes: int) -> LayerWork:
    """Count what `in_chunks` computes. `work_of(n)` counts n tokens at once, `row_bytes` is the size of a result's row.

    Of several chunks nothing is kept but the input, which is counted where it is made. The scratch is all that one
    chunk takes, beside the gradients of input and result.
    """
    work = work_of(num_tokens)
    if num_tokens <= CHUNK_TOKENS:
        return work
    largest = work_of(CHUNK_TOKENS)
    count, rest = divmod(num_tokens, CHUNK_TOKENS)
    last = {part.name: part.nbytes for part in work_of(rest).keepable} if rest else {}
    return replace(
        work,
        activation_bytes=0,
        workspace_bytes=largest.activation_bytes + largest.workspace_bytes + 2 * num_tokens * row_bytes,
        # Each chunk keeps tensors of its own. The recomputation needs none of their memory twice.
        keepable=tuple(
            replace(
                part,
                nbytes=count * part.nbytes + last.get(part.name, 0),
                flops=whole.flops,
                activation_bytes=0,
            )
            for part, whole in zip(largest.keepable, work.keepable, strict=True)
        ),
        unkept_bytes=work.activation_bytes,
    )


def in_slices(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Compute `function(*inputs)`, on an accelerator for at most `SLICE_ELEMENTS` of the first input at once.

    Each input and result is `[N, ...]`, and a row of the results depends on the same row of the inputs. So what the function
    holds in fp32 stays small. A compiler gets all rows: it fuses the operations, and holds none of that.
    """
    first = inputs[0]
    num_rows = len(first)
    step = max(1, SLICE_ELEMENTS * num_rows // max(1, first.numel()))
    if num_rows <= step or not uses_fused(first):
        return function(*inputs)
    results: tuple[Tensor, ...] = ()
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        found = function(*(one[rows] for one in inputs))
        if not results:
            results = tuple(one.new_empty((num_rows, *one.shape[1:])) for one in found)
        for result, one in zip(results, found, strict=True):
            result[rows] = one
    return results


def elements_at_once(elements: int, device: str, num_tokens: int | None = None) -> int:
    """Count how many of these elements `in_slices` takes at once on a type of device.

    A block of one chunk may be compiled, and then counts all of them, unless compiled code is known to hold none of them:
    without `num_tokens`.
    """
    is_cut = is_accelerator(device) and (num_tokens is None or num_tokens > CHUNK_TOKENS)
    return min(elements, SLICE_ELEMENTS) if is_cut else elements


class _Run:
    """One call of `in_chunks`, with all that the backward needs to compute a chunk again as the forward did.

    By then the module may hold other parameters, or the seeds of another micro-batch.
    """

    def __init__(
        self, module: nn.Module, function: Callable[..., Tensor], num_inputs: int, is_read: bool
    ) -> None:
        self.function, self.num_inputs, self.is_read = function, num_inputs, is_read
        self._parameters = [(part, dict(part._parameters)) for part in module.modules()]
        adapted = (part for part in module.modules() if isinstance(part, Adaptable))
        self._seeds = [(part, part.seed) for part in adapted if part.seed is not None]
        self._replaying = rest_of_replay()

    def each(self, run_chunk: Callable[[slice], None], num_tokens: int) -> None:
        before = [(part, dict(part._parameters)) for part, _ in self._parameters]
        try:
            for part, parameters in self._parameters:
                part._parameters.update(parameters)
            with self._replaying():
                for number, start in enumerate(range(0, num_tokens, CHUNK_TOKENS)):
                    for adapted, seed in self._seeds:
                        # The first chunk has the seed itself. An odd constant spreads the others over 63 bits.
                        adapted.seed = (seed + number * 0xA24BAED4963EE407) % 2**63
                    run_chunk(slice(start, start + CHUNK_TOKENS))
        finally:
            for adapted, seed in self._seeds:
                adapted.seed = seed
            for part, parameters in before:
                part._parameters.update(parameters)


class _InChunks(torch.autograd.Function):
    """The operation of `in_chunks`. `tensors` are the inputs and the trained parameters, which may alone need gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        inputs = tensors[: run.num_inputs]
        if not run.is_read:
            return inputs[0].new_zeros(()).expand_as(inputs[0])
        output = torch.empty_like(inputs[0])

        def compute(rows: slice) -> None:
            output[rows] = run.function(*(tensor[rows] for tensor in inputs))

        run.each(compute, len(output))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run, ctx.run = ctx.run, None  # what it replays is of no more use
        inputs, trained = ctx.saved_tensors[: run.num_inputs], ctx.saved_tensors[run.num_inputs :]
        wants = ctx.needs_input_grad[1 : 1 + len(inputs)]
        found = [torch.empty_like(one) if wanted else None for one, wanted in zip(inputs, wants, strict=True)]

        def differentiate(rows: slice) -> None:
            leaves = [
                one[rows].detach().requires_grad_(wanted) for one, wanted in zip(inputs, wants, strict=True)
            ]
            with torch.enable_grad():
                output = run.function(*leaves)
            torch.autograd.backward(output, grads[0][rows])
            for total, leaf in zip(found, leaves, strict=True):
                if total is not None:
                    total[rows] = 0 if leaf.grad is None else leaf.grad

        run.each(differentiate, len(inputs[0]))
        return None, *found, *(None for _ in trained)

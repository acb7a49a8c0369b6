"""The kernels of sinks in Triton. A program has all heads of a token, and in the backward a run of tokens.

They have been run in Triton's interpreter, not on a card.

Shapes: N tokens, H heads, C channels of a head, P partial sums of the sinks' gradient.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchround.models.common.sinks import joined_results, partial_gradients, tokens_each

ELEMENTS_OF_A_WARP = 512


def launch_join_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    output, log_sums = output.contiguous(), log_sums.contiguous()
    found, found_sums = joined_results(output, log_sums, sinks)
    if len(output):  # a grid without programs is refused
        _join_sinks[(len(output),)](
            *(output, log_sums, sinks, found, found_sums, *output.shape), **_blocks(output)
        )
    return found, found_sums


def launch_join_sinks_backward(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    tokens, partials = len(grad), partial_gradients(grad, output, log_sums, sinks)
    if tokens:
        _join_sinks_backward[(len(partials),)](
            *(grad, output, log_sums, sinks, partials, *grad.shape, tokens_each(tokens)), **_blocks(grad)
        )
    return partials


def _blocks(output: Tensor) -> dict[str, int]:
    heads, channels = (triton.next_power_of_2(size) for size in output.shape[1:])
    warps = max(1, min(16, heads * channels // ELEMENTS_OF_A_WARP))
    return {"HEADS": heads, "CHANNELS": channels, "num_warps": warps}


@triton.jit
def _join_sinks(
    output: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    found: tl.tensor,
    found_sums: tl.tensor,
    tokens: tl.tensor,
    num_heads: tl.tensor,
    channels: tl.tensor,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    known = head < num_heads
    plain = tl.load(log_sums + head.to(tl.int64) * tokens + token, mask=known, other=0.0)
    score = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32)
    largest = tl.maximum(plain, score)
    joined = largest + tl.log(tl.exp(plain - largest) + tl.exp(score - largest))
    tl.store(found_sums + head.to(tl.int64) * tokens + token, joined, mask=known)
    inside = known[:, None] & (channel < channels)[None, :]
    place = (token * num_heads + head)[:, None] * channels + channel[None, :]
    mixed = tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
    result = mixed * tl.exp(plain - joined)[:, None]
    tl.store(found + place, result.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _join_sinks_backward(
    grad: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    partials: tl.tensor,
    tokens: tl.tensor,
    num_heads: tl.tensor,
    channels: tl.tensor,
    each: tl.tensor,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, HEADS), tl.arange(0, CHANNELS)
    known = head < num_heads
    inside = known[:, None] & (channel < channels)[None, :]
    score = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros([HEADS], tl.float32)
    for token in range(program * each, tl.minimum(program * each + each, tokens)):
        place = (token * num_heads + head)[:, None] * channels + channel[None, :]
        outer = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
        joined = tl.load(log_sums + head.to(tl.int64) * tokens + token, mask=known, other=0.0)
        sums -= tl.exp(score - joined) * tl.sum(outer * mixed, axis=1)
    tl.store(partials + program * num_heads + head, sums, mask=known)

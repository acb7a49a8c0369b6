"""The plain update of AdamW: against NumPy; any way to keep a segment, any cut, any threads."""

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.kernel_kinds import cut_out
from torchround.optim import COMPACT, EXACT, UpdateBuffers, predict_, update_
from torchround.optim.formats import StateFormat
from torchround.optim.rules.adamw import AdamWRule
from torchround.optim.split_weights import join, split
from torchround.optim.update_pass import CHUNK_ELEMENTS

RULE = AdamWRule((0.9, 0.95), 1e-8, 0.1)
LR = 1e-2
CHUNK = 256


@dataclass(frozen=True)
class Kept:
    format: StateFormat
    is_split: bool
    versions: int = 1
    predicts: bool = False

    def __str__(self):
        weights = "split" if self.is_split else "fp32"
        return f"{self.format.name} {weights} {self.versions}{' predicted' if self.predicts else ''}"


SPLIT, SPLIT_COMPACT = Kept(EXACT, is_split=True), Kept(COMPACT, is_split=True)
PREDICTED = Kept(EXACT, is_split=False, predicts=True)
PREDICTED_COMPACT = Kept(COMPACT, is_split=False, predicts=True)
WAYS = [SPLIT, Kept(COMPACT, is_split=True, versions=2), Kept(COMPACT, is_split=False), PREDICTED, PREDICTED_COMPACT]


def buffers_of(way, numel, seed=0, gradient_dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    weight, first, second, gradient = (torch.randn(numel, generator=generator) for _ in range(4))
    moments = (first * 0.1, second.square() * 0.01)
    parts = {}
    for value, numbers in zip(RULE.values, moments, strict=True):
        for part in way.format.parts(value):
            parts[part.name] = torch.zeros(part.numel(numel), dtype=part.dtype)
        way.format.write(value, parts, 0, numbers)
    device_weight, residual = split(weight)
    written = device_weight if way.versions == 1 else torch.zeros_like(device_weight)
    halves = (None, residual, device_weight) if way.is_split else (weight, None, None)
    return UpdateBuffers(RULE, way.format, *halves, written, parts, gradient.to(gradient_dtype))


def update(way, buffers, number=3):
    update_(buffers, lr=LR, update=number, gradient_scale=0.7, predicts=way.predicts)


def tensors(buffers):
    found = {f.name: getattr(buffers, f.name) for f in fields(buffers)}
    return {name: t for name, t in found.items() if isinstance(t, Tensor)} | dict(buffers.parts)


def mapped(buffers, function):
    found = {id(t): function(t) for t in tensors(buffers).values()}
    changed = {f.name: found[id(t)] for f in fields(buffers) if id(t := getattr(buffers, f.name)) in found}
    return replace(buffers, **changed, parts={name: found[id(t)] for name, t in buffers.parts.items()})


def same(left, right):
    rights = tensors(right)
    return all(torch.equal(tensor, rights[name]) for name, tensor in tensors(left).items())


def numpy_adamw(numel, steps, gradient_of):
    f32, (beta1, beta2) = np.float32, RULE.betas
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(0)).numpy()
    first, second = np.zeros(numel, f32), np.zeros(numel, f32)
    for step in range(1, steps + 1):
        gradient = gradient_of(step).float().numpy() * f32(0.7)
        first = (gradient - first) * f32(1 - beta1) + first
        second = second * f32(beta2) + gradient * f32(1 - beta2) * gradient
        spread = np.sqrt(second) * f32((1 - beta2**step) ** -0.5) + f32(RULE.eps)
        weight = weight * f32(1 - LR * RULE.weight_decay) + first * f32(-LR / (1 - beta1**step)) / spread
    return weight


@pytest.mark.parametrize("versions", [1, 2])
def test_a_hundred_steps_with_split_weights_are_fp32_adamw_in_numpy_bit_for_bit(versions):
    numel, steps = 1000, 100
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(numel, generator=generator).bfloat16() for _ in range(50)]

    def gradient_of(step):
        return gradients[step % 50] * (1 + step % 7)

    way = Kept(EXACT, is_split=True, versions=versions)
    buffers = buffers_of(way, numel)
    for part in buffers.parts.values():
        part.zero_()
    for step in range(1, steps + 1):
        buffers.gradient = gradient_of(step)
        update(way, buffers, step)
        # The version just written is the newest one, which the next update reads.
        buffers.current, buffers.written = buffers.written, buffers.current
    expected = torch.from_numpy(numpy_adamw(numel, steps, gradient_of))
    assert torch.equal(join(buffers.current, buffers.residual), expected)
    assert torch.equal(buffers.current, split(expected)[0])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_chunks_change_no_bit(way):
    whole = buffers_of(way, CHUNK_ELEMENTS + 5 * CHUNK + 5)
    cut = mapped(whole, Tensor.clone)
    update(way, whole)
    for start, stop in pairwise((0, 3 * CHUNK, CHUNK_ELEMENTS - CHUNK, whole.numel)):
        update(way, cut_out(cut, start, stop))
    assert same(whole, cut)


def test_bits_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(buffers_of(SPLIT, CHUNK_ELEMENTS + 4321))
            update(SPLIT, results[-1])
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.parametrize("way", [PREDICTED, PREDICTED_COMPACT], ids=str)
def test_predicted_device_weights_are_one_more_step_along_the_kept_state_rounded_once(way):
    for number, numel in ((1, 77), (3, 5 * CHUNK + 77), (1000, CHUNK_ELEMENTS + 77)):
        buffers = buffers_of(way, numel, seed=number)
        plain = mapped(buffers, Tensor.clone)
        update(way, buffers, number)
        update(replace(way, predicts=False), plain, number)
        derived = replace(buffers, written=torch.zeros_like(buffers.written), gradient=None)
        predict_(derived, lr=LR, update=number)
        assert torch.equal(derived.written, buffers.written)
        assert not torch.equal(buffers.written, buffers.weight.bfloat16())
        assert same(replace(plain, written=buffers.written), buffers)
        beta1, beta2 = RULE.betas
        first, second = (tensor.numpy() for tensor in buffers.values(0, buffers.numel))
        spread = np.sqrt(second) * np.float32((1 - beta2**number) ** -0.5) + np.float32(RULE.eps)
        expected = buffers.weight.numpy() + first * np.float32(-LR / (1 - beta1**number)) / spread
        assert torch.equal(buffers.written, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize(
    "change",
    [
        {"residual": None},
        {"current": None},
        {"written": torch.zeros(2, 150, dtype=torch.bfloat16)},
        {"gradient": None},
        {"gradient": torch.zeros(299)},
        {"parts": {}},
    ],
    ids=str,
)
def test_buffers_that_do_not_fit_together_are_refused_untouched(change):
    buffers = replace(buffers_of(SPLIT_COMPACT, 300), **change)
    before = mapped(buffers, Tensor.clone)
    with pytest.raises(ValueError, match="missing, or of another length"):
        update(SPLIT_COMPACT, buffers)
    assert same(buffers, before)


def test_predictions_of_split_or_shared_weights_are_refused():
    shared = buffers_of(PREDICTED, 300)
    shared.written = shared.weight
    for buffers in (buffers_of(SPLIT, 300), shared):
        before = mapped(buffers, Tensor.clone)
        with pytest.raises(ValueError, match="predict"):
            update_(buffers, lr=LR, update=1, predicts=True)
        assert same(buffers, before)

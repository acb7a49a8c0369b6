"""The plain update of AdamW: against NumPy; any way to keep a segment, any cut, any threads."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.kernel_kinds import (
    ADAMW,
    SPLIT,
    copy_of,
    cut_out,
    example_buffers,
    have_same_bits,
    kind_of,
    written_in_place,
)
from torchround.optim import COMPACT, EXACT, predict_, update_
from torchround.optim.split_weights import join, split
from torchround.optim.update_pass import CHUNK_ELEMENTS

LR = 1e-2
CHUNK = 256
PREDICTED = [kind_of(state=state, predicts=True) for state in (EXACT, COMPACT)]


def update(kind, buffers, number=3):
    update_(buffers, lr=LR, update=number, gradient_scale=0.7, predicts=kind.predicts)


def numpy_adamw(weight, steps, gradient_of):
    f32, (beta1, beta2) = np.float32, ADAMW.betas
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, steps + 1):
        gradient = gradient_of(step).float().numpy() * f32(0.7)
        first = (gradient - first) * f32(1 - beta1) + first
        second = second * f32(beta2) + gradient * f32(1 - beta2) * gradient
        spread = np.sqrt(second) * f32((1 - beta2**step) ** -0.5) + f32(ADAMW.eps)
        weight = weight * f32(1 - LR * ADAMW.weight_decay) + first * f32(-LR / (1 - beta1**step)) / spread
    return weight


@pytest.mark.parametrize("versions", [1, 2])
def test_a_hundred_steps_with_split_weights_are_fp32_adamw_in_numpy_bit_for_bit(versions):
    numel, steps = 1000, 100
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(numel, generator=generator).bfloat16() for _ in range(50)]

    def gradient_of(step):
        return gradients[step % 50] * (1 + step % 7)

    weight = torch.randn(numel, generator=generator)
    buffers = example_buffers(SPLIT[0], numel)
    buffers.current, buffers.residual = split(weight)
    if versions == 1:
        buffers.written = buffers.current
    for part in buffers.parts.values():
        part.zero_()
    for step in range(1, steps + 1):
        buffers.gradient = gradient_of(step)
        update(SPLIT[0], buffers, step)
        # The version just written is the newest one, which the next update reads.
        buffers.current, buffers.written = buffers.written, buffers.current
    expected = torch.from_numpy(numpy_adamw(weight.numpy(), steps, gradient_of))
    assert torch.equal(join(buffers.current, buffers.residual), expected)
    assert torch.equal(buffers.current, split(expected)[0])


@pytest.mark.parametrize("kind", [*SPLIT, kind_of(state=COMPACT), *PREDICTED])
def test_chunks_change_no_bit(kind):
    example = example_buffers(kind, CHUNK_ELEMENTS + 5 * CHUNK + 5)
    for whole in (example, written_in_place(example, kind.predicts)):
        cut = copy_of(whole)
        update(kind, whole)
        for start, stop in pairwise((0, 3 * CHUNK, CHUNK_ELEMENTS - CHUNK, whole.numel)):
            update(kind, cut_out(cut, start, stop))
        assert have_same_bits(whole, cut)


def test_bits_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(example_buffers(SPLIT[0], CHUNK_ELEMENTS + 4321))
            update(SPLIT[0], results[-1])
    finally:
        torch.set_num_threads(before)
    assert have_same_bits(results[0], results[1]) and have_same_bits(results[0], results[2])


@pytest.mark.parametrize("kind", PREDICTED)
def test_predicted_device_weights_are_one_more_step_along_the_kept_state_rounded_once(kind):
    for number, numel in ((1, 77), (3, 5 * CHUNK + 77), (1000, CHUNK_ELEMENTS + 77)):
        buffers = example_buffers(kind, numel, seed=number)
        plain = copy_of(buffers)
        update(kind, buffers, number)
        update(replace(kind, predicts=False), plain, number)
        derived = replace(buffers, written=torch.zeros_like(buffers.written), gradient=None)
        predict_(derived, lr=LR, update=number)
        assert torch.equal(derived.written, buffers.written)
        assert not torch.equal(buffers.written, buffers.weight.bfloat16())
        assert have_same_bits(replace(plain, written=buffers.written), buffers)
        beta1, beta2 = ADAMW.betas
        first, second = (tensor.numpy() for tensor in buffers.values(0, buffers.numel))
        spread = np.sqrt(second) * np.float32((1 - beta2**number) ** -0.5) + np.float32(ADAMW.eps)
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
    buffers = replace(written_in_place(example_buffers(SPLIT[1], 300), predicts=False), **change)
    before = copy_of(buffers)
    with pytest.raises(ValueError, match="missing, or of another length"):
        update(SPLIT[1], buffers)
    assert have_same_bits(buffers, before)


def test_predictions_of_split_or_shared_weights_are_refused():
    shared = example_buffers(PREDICTED[0], 300)
    shared.written = shared.weight
    for buffers in (example_buffers(SPLIT[0], 300), shared):
        before = copy_of(buffers)
        with pytest.raises(ValueError, match="predict"):
            update_(buffers, lr=LR, update=1, predicts=True)
        assert have_same_bits(buffers, before)

"""AdamW against torch.optim and float64, its independence of cuts, and what a failure leaves behind."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.kept_faults import PlantedError
from tests.support.plain_adamw import adamw_predict_, adamw_update_
from tests.support.update_faults import FailAtOperation
from torchround.optim import UpdateProgress
from torchround.optim.optimizer import rounded_numbers
from torchround.optim.rules.adamw import AdamWRule
from torchround.optim.update_pass import CHUNK_ELEMENTS

HYPER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

Buffers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_buffers(numel: int, seed: int = 0, gradient: torch.dtype = torch.bfloat16) -> Buffers:
    """(weight, exp_avg, exp_avg_sq, gradient, device_weight) with the spread of a model in training."""
    generator = torch.Generator().manual_seed(seed)
    weight, exp_avg, grads = (torch.randn(numel, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(numel, generator=generator) * 1e-2
    device_weight = torch.full((numel,), 7.0, dtype=torch.bfloat16)
    return weight, exp_avg.mul_(0.1), exp_avg_sq, grads.to(gradient), device_weight


def update(
    buffers: Buffers, step: int = 3, scale: float = 0.7, progress: UpdateProgress | None = None, predicts: bool = False
) -> None:
    adamw_update_(
        *buffers, **HYPER, bias_correction_step=step, gradient_scale=scale, progress=progress, predicts=predicts
    )


def same_bits(left: Buffers, right: Buffers) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def copy_of(buffers: Buffers) -> Buffers:
    return tuple(tensor.clone() for tensor in buffers)  # type: ignore[return-value]


def adamw_float64(start: Tensor, gradient_of: Callable[[int], Tensor], num_steps: int) -> Tensor:
    """Apply the textbook formula in float64 (Loshchilov & Hutter, algorithm 2)."""
    weight = start.double()
    first = torch.zeros_like(weight)
    second = torch.zeros_like(weight)
    beta1, beta2 = HYPER["betas"]
    for step in range(1, num_steps + 1):
        gradient = gradient_of(step).double()
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        unbiased = first / (1 - beta1**step)
        spread = (second / (1 - beta2**step)).sqrt()
        weight = weight - HYPER["lr"] * (unbiased / (spread + HYPER["eps"]) + HYPER["weight_decay"] * weight)
    return weight


def gradients(numel: int) -> Callable[[int], Tensor]:
    def gradient_of(step: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(step)) * 0.1

    return gradient_of


def test_a_hundred_steps_are_torch_adamw_within_rounding_and_as_near_to_float64() -> None:
    numel, num_steps = 20_001, 100
    start = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    gradient_of = gradients(numel)

    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([parameter], **HYPER, foreach=False)
    weight, exp_avg, exp_avg_sq = start.clone(), torch.zeros(numel), torch.zeros(numel)
    device_weight = torch.zeros(numel, dtype=torch.bfloat16)
    for step in range(1, num_steps + 1):
        parameter.grad = gradient_of(step)
        reference.step()
        adamw_update_(weight, exp_avg, exp_avg_sq, gradient_of(step), device_weight, **HYPER, bias_correction_step=step)

    theirs = parameter.detach()
    # One ulp of a weight near 1 is 1.2e-7; a hundred roundings that go either way stay within a few of them.
    torch.testing.assert_close(weight, theirs, rtol=1e-6, atol=1e-6)
    state = reference.state[parameter]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=1e-9)
    assert torch.equal(device_weight, weight.bfloat16())

    exact = adamw_float64(start, gradient_of, num_steps)
    our_distance = (weight - exact).norm().item()
    their_distance = (theirs - exact).norm().item()
    assert 0 < our_distance <= 1.2 * their_distance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_is_scaled_in_fp32_before_anything_else(dtype: torch.dtype) -> None:
    scaled_inside = random_buffers(1000, gradient=dtype)
    scaled_outside = copy_of(scaled_inside)[:3] + (scaled_inside[3].float() * 0.3, scaled_inside[4].clone())
    update(scaled_inside, scale=0.3)
    update(scaled_outside, scale=1.0)
    assert same_bits(scaled_inside[:3], scaled_outside[:3])  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(
    numel=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_where_the_buffer_is_cut(
    numel: int, cuts: list[int], dtype: torch.dtype, seed: int
) -> None:
    whole = random_buffers(numel, seed, dtype)
    pieces = copy_of(whole)
    update(whole)
    bounds = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for start, stop in itertools.pairwise(bounds):
        update(tuple(tensor[start:stop] for tensor in pieces))  # type: ignore[arg-type]
    assert same_bits(whole, pieces)


def test_bits_of_a_layer_updated_whole_and_parameter_by_parameter_are_the_same() -> None:
    sizes = [37, CHUNK_ELEMENTS, 1, 5003, 2 * CHUNK_ELEMENTS + 11]
    whole = random_buffers(sum(sizes))
    parameters = copy_of(whole)
    update(whole)
    for parts in zip(*(tensor.split(sizes) for tensor in parameters), strict=True):
        update(parts)
    assert same_bits(whole, parameters)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            buffers = random_buffers(CHUNK_ELEMENTS + 4321)
            update(buffers)
            results.append(buffers)
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_the_device_weight_may_be_the_fp32_weight_itself() -> None:
    weight, exp_avg, exp_avg_sq, gradient, device_weight = random_buffers(500)
    shared = weight.clone()
    moments = (exp_avg.clone(), exp_avg_sq.clone())
    update((weight, exp_avg, exp_avg_sq, gradient, device_weight))
    update((shared, *moments, gradient, shared))
    assert torch.equal(shared, weight)


def test_a_prediction_into_the_fp32_weight_itself_is_refused_untouched() -> None:
    buffers = random_buffers(500)
    shared = (*buffers[:4], buffers[0])
    before = copy_of(shared)
    with pytest.raises(ValueError, match="needs fp32 weights beside the device weights"):
        update(shared, predicts=True)
    assert same_bits(shared, before)


def test_bits_are_those_of_ieee_arithmetic_in_numpy() -> None:
    buffers = random_buffers(10_007)
    weight, exp_avg, exp_avg_sq, gradient, _ = (tensor.float().numpy().copy() for tensor in buffers)
    update(buffers, step=3, scale=0.7)

    beta1, beta2 = HYPER["betas"]
    f32 = np.float32
    scaled = gradient * f32(0.7)
    first = (scaled - exp_avg) * f32(1 - beta1) + exp_avg
    second = exp_avg_sq * f32(beta2) + scaled * f32(1 - beta2) * scaled
    spread = np.sqrt(second) * f32((1 - beta2**3) ** -0.5) + f32(HYPER["eps"])
    step = first * f32(-HYPER["lr"] / (1 - beta1**3)) / spread
    expected = weight * f32(1 - HYPER["lr"] * HYPER["weight_decay"]) + step
    for ours, theirs in zip(buffers, (expected, first, second), strict=False):
        assert theirs.dtype == np.float32
        assert torch.equal(ours, torch.from_numpy(theirs))


def operations_of_an_update(buffers: Buffers, predicts: bool) -> int:
    with FailAtOperation(fatal=0) as counter:
        update(buffers, predicts=predicts)
    return counter.seen


@pytest.mark.parametrize("predicts", [False, True])
def test_an_update_that_fails_at_any_operation_is_finished_by_a_second_call(predicts: bool) -> None:
    start = random_buffers(2 * CHUNK_ELEMENTS + 100)
    finished = copy_of(start)
    for fatal in range(1, operations_of_an_update(finished, predicts) + 1):
        buffers, progress = copy_of(start), UpdateProgress()
        with pytest.raises(PlantedError), FailAtOperation(fatal):
            update(buffers, progress=progress, predicts=predicts)

        done, later = progress.done, min(progress.done + CHUNK_ELEMENTS, start[0].numel())
        for now, new, old in zip(buffers, finished, start, strict=True):
            assert torch.equal(now[:done], new[:done])
            assert torch.equal(now[later:], old[later:])
        update(buffers, progress=progress, predicts=predicts)
        assert same_bits(buffers, finished)


def test_a_predicted_device_weight_is_one_more_step_along_the_same_direction_rounded_once() -> None:
    buffers = random_buffers(CHUNK_ELEMENTS + 10_007)
    plain = copy_of(buffers)
    update(plain)
    update(buffers, predicts=True)
    assert same_bits(buffers[:4], plain[:4])  # type: ignore[arg-type]
    weight, first, second = (tensor.numpy() for tensor in buffers[:3])
    beta1, beta2 = HYPER["betas"]
    spread = np.sqrt(second) * np.float32((1 - beta2**3) ** -0.5) + np.float32(HYPER["eps"])
    expected = weight + first * np.float32(-HYPER["lr"] / (1 - beta1**3)) / spread
    assert torch.equal(buffers[4], torch.from_numpy(expected).bfloat16())


@settings(max_examples=15, deadline=None)
@given(numel=st.integers(1, 3000), step=st.integers(1, 10**6), seed=st.integers(0, 1000))
def test_predicted_device_weights_follow_from_the_state_bit_for_bit(numel: int, step: int, seed: int) -> None:
    buffers = random_buffers(numel, seed)
    update(buffers, step=step, predicts=True)
    weight, exp_avg, exp_avg_sq, _, device_weight = buffers
    derived = torch.empty_like(device_weight)
    numbers = {name: value for name, value in HYPER.items() if name != "weight_decay"}
    adamw_predict_(derived, weight, exp_avg, exp_avg_sq, **numbers, bias_correction_step=step)
    assert torch.equal(derived, device_weight)


def test_a_prediction_costs_one_step_of_the_moments_a_chunk_and_no_second_pass() -> None:
    """Every other operation of an update is there without it; nothing reads or writes a whole buffer again."""
    numel = 2 * CHUNK_ELEMENTS + 100
    plain, predicting = (operations_of_an_update(random_buffers(numel), predicts) for predicts in (False, True))
    rule = AdamWRule(HYPER["betas"], HYPER["eps"], 0.0)
    numbers = rounded_numbers(rule.numbers(HYPER["lr"], 1, 1.0))
    with FailAtOperation(fatal=0) as counter:
        rule.next_step((torch.ones(10), torch.ones(10)), numbers).add_(torch.ones(10))
    # `ones` takes an operation each time.
    assert predicting == plain + 3 * (counter.seen - 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: torch.zeros(9)}, "weight has shape"),
        ({3: torch.zeros(9)}, "gradient has shape"),
        ({1: torch.zeros(10, dtype=torch.bfloat16)}, "exp_avg has dtype"),
        ({3: torch.zeros(10, dtype=torch.int64)}, "gradient has dtype"),
        ({4: torch.zeros(2, 5)}, "written has shape"),
    ],
)
def test_buffers_that_do_not_fit_together_are_refused_untouched(change: dict[int, Tensor], words: str) -> None:
    buffers = tuple(change.get(i, tensor) for i, tensor in enumerate(random_buffers(10)))
    before = copy_of(buffers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        update(buffers)  # type: ignore[arg-type]
    assert same_bits(buffers, before)  # type: ignore[arg-type]


def test_a_step_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="counts from 1, got 0"):
        update(random_buffers(10), step=0)

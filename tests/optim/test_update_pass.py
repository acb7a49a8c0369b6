"""The plain update over segments: split and fp32 weights, both formats, one or two versions, and interruptions."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.kept_faults import PlantedError
from tests.support.update_faults import FailAtOperation
from torchround.optim import COMPACT, EXACT, UpdateBuffers, UpdateProgress, predict_, update_, update_pass
from torchround.optim.formats import StateFormat
from torchround.optim.rules.adamw import AdamWRule
from torchround.optim.split_weights import join, split

RULE = AdamWRule((0.9, 0.95), 1e-8, 0.1)
LR = 1e-2
CHUNK = 256


@dataclass(frozen=True)
class Kept:
    """A way to keep a segment: the format, and whether weights are split, two versions, predicted."""

    format: StateFormat
    is_split: bool
    versions: int = 1
    predicts: bool = False

    def __str__(self) -> str:
        weights = "split" if self.is_split else "fp32"
        return f"{self.format.name} {weights} {self.versions}{' predicted' if self.predicts else ''}"


WAYS = [
    Kept(EXACT, is_split=True),
    Kept(EXACT, is_split=True, versions=2),
    Kept(EXACT, is_split=False, predicts=True),
    Kept(COMPACT, is_split=True),
    Kept(COMPACT, is_split=True, versions=2),
    Kept(COMPACT, is_split=False),
    Kept(COMPACT, is_split=False, predicts=True),
]


def buffers_of(way: Kept, numel: int, seed: int = 0) -> UpdateBuffers:
    """Return a segment in the middle of training: random weights and moments, a bf16 gradient."""
    generator = torch.Generator().manual_seed(seed)
    weight, first, second, gradient = (torch.randn(numel, generator=generator) for _ in range(4))
    moments = (first * 0.1, second.square() * 0.01)
    parts: dict[str, Tensor] = {}
    for value, numbers in zip(RULE.values, moments, strict=True):
        for part in way.format.parts(value):
            parts[part.name] = torch.zeros(part.numel(numel), dtype=part.dtype)
        way.format.write(value, parts, 0, numbers)
    device_weight, residual = split(weight)
    written = device_weight if way.versions == 1 else torch.zeros_like(device_weight)
    halves = (None, residual, device_weight) if way.is_split else (weight, None, None)
    return UpdateBuffers(RULE, way.format, *halves, written, parts, gradient.bfloat16())


def update(way: Kept, buffers: UpdateBuffers, number: int = 3, progress: UpdateProgress | None = None) -> None:
    update_(buffers, lr=LR, update=number, gradient_scale=0.7, progress=progress, predicts=way.predicts)


def tensors(buffers: UpdateBuffers) -> dict[str, Tensor]:
    found = {f.name: getattr(buffers, f.name) for f in fields(buffers)}
    return {name: t for name, t in found.items() if isinstance(t, Tensor)} | dict(buffers.parts)


def copy_of(buffers: UpdateBuffers) -> UpdateBuffers:
    """Copy all tensors; `written` stays `current` if it was."""
    copies = {id(t): t.clone() for t in tensors(buffers).values()}
    changed = {f.name: copies[id(t)] for f in fields(buffers) if id(t := getattr(buffers, f.name)) in copies}
    return replace(buffers, **changed, parts={name: copies[id(t)] for name, t in buffers.parts.items()})


def same(left: UpdateBuffers, right: UpdateBuffers) -> bool:
    rights = tensors(right)
    return all(torch.equal(tensor, rights[name]) for name, tensor in tensors(left).items())


def numpy_adamw(numel: int, steps: int, gradient_of: Callable[[int], Tensor]) -> np.ndarray:
    """Train fp32 weights in NumPy's arithmetic, from the weights of `buffers_of`, with zero moments."""
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
def test_a_thousand_steps_with_split_weights_are_fp32_adamw_bit_for_bit(versions: int) -> None:
    numel, steps = 1000, 1000
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(numel, generator=generator).bfloat16() for _ in range(50)]

    def gradient_of(step: int) -> Tensor:
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
    assert buffers.current is not None
    assert buffers.residual is not None
    assert torch.equal(join(buffers.current, buffers.residual), expected)
    assert torch.equal(buffers.current, split(expected)[0])


# The others differ from one of these in what they do not write.
@pytest.mark.parametrize("way", [WAYS[1], WAYS[3], WAYS[6]], ids=str)
def test_an_update_that_fails_at_any_operation_is_finished_by_a_second_call(
    way: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_pass, "CHUNK_ELEMENTS", CHUNK)
    start = buffers_of(way, CHUNK + 100)
    finished = copy_of(start)
    with FailAtOperation(fatal=0) as counter:
        update(way, finished)
    old, new = tensors(start), tensors(finished)
    for fatal in range(1, counter.seen + 1):
        buffers, progress = copy_of(start), UpdateProgress()
        with pytest.raises(PlantedError), FailAtOperation(fatal):
            update(way, buffers, progress=progress)
        for name, now in tensors(buffers).items():
            # A scale belongs to 128 elements.
            block = -(-start.numel // now.numel())
            done, later = progress.done // block, (progress.done + CHUNK) // block
            assert torch.equal(now[:done], new[name][:done]), (fatal, name)
            assert torch.equal(now[later:], old[name][later:]), (fatal, name)
        update(way, buffers, progress=progress)
        assert same(buffers, finished), fatal


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_chunks_change_no_bit(way: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = buffers_of(way, 7 * CHUNK + 5)
    cut = copy_of(whole)
    update(way, whole)
    monkeypatch.setattr(update_pass, "CHUNK_ELEMENTS", CHUNK)
    update(way, cut)
    assert same(whole, cut)


@pytest.mark.parametrize("way", [way for way in WAYS if way.predicts], ids=str)
def test_predicted_device_weights_follow_from_the_kept_state_bit_for_bit(way: Kept) -> None:
    for number in (1, 3, 1000):
        buffers = buffers_of(way, 5 * CHUNK + 77, seed=number)
        update(way, buffers, number)
        derived = replace(buffers, written=torch.zeros_like(buffers.written), gradient=None)
        predict_(derived, lr=LR, update=number)
        assert torch.equal(derived.written, buffers.written)
        assert buffers.weight is not None
        assert not torch.equal(buffers.written, buffers.weight.bfloat16())


def test_a_compact_prediction_uses_the_moments_as_they_are_kept() -> None:
    """The unrounded moments give another step, so this fails if the update predicts from them."""
    exact, compact = (buffers_of(Kept(state, False, predicts=True), 5000) for state in (EXACT, COMPACT))
    compact.written = compact.written.float()
    update_(compact, lr=LR, update=3, predicts=True)
    numbers = [torch.tensor(number) for number in RULE.numbers(LR, 3, 1.0)]
    assert compact.weight is not None
    step = RULE.next_step(compact.values(0, 5000), tuple(numbers))
    assert torch.equal(compact.written, step + compact.weight)
    exact.parts = {v.name: COMPACT.read(v, buffers_of(Kept(COMPACT, False), 5000).parts, 0, 5000) for v in RULE.values}
    update_(exact, lr=LR, update=3)
    assert torch.equal(exact.weight, compact.weight)
    unrounded = RULE.next_step(exact.values(0, 5000), tuple(numbers))
    assert not torch.equal(unrounded, step)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"residual": None}, "residual is missing"),
        ({"residual": torch.zeros(300)}, "residual has dtype"),
        ({"current": None}, "current is missing"),
        ({"written": torch.zeros(300)}, "written has dtype"),
        ({"gradient": None}, "gradient is missing"),
        ({"gradient": torch.zeros(299)}, "gradient has shape"),
        ({"parts": {}}, "exp_avg is missing"),
    ],
)
def test_buffers_that_do_not_fit_together_are_refused_untouched(change: dict[str, object], words: str) -> None:
    way = Kept(COMPACT, is_split=True)
    buffers = replace(buffers_of(way, 300), **change)
    before = copy_of(buffers)
    with pytest.raises(ValueError, match=words):
        update(way, buffers)
    assert same(buffers, before)


def test_split_weights_are_not_predicted() -> None:
    buffers = buffers_of(Kept(EXACT, is_split=True), 300)
    with pytest.raises(ValueError, match="a prediction needs fp32 weights"):
        update_(buffers, lr=LR, update=1, predicts=True)

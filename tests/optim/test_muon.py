"""Muon's host arithmetic and its matrices, compared with `torch.optim.Muon`."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.borrowed import peak_of_tensors
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.worker.orthogonalise import (
    COEFFICIENTS,
    STEPS,
    iterated,
    orthogonalised,
    piece_elements,
    pieces,
    scratch_bytes,
    slot_bytes,
)
from torchround.optim import EXACT, ParameterFacts, UpdateBuffers, UpdateRule, make_optimizer, update_
from torchround.optim.update_pass import look_ahead_
from torchround.pipeline import update_costs
from torchround.pipeline.update_costs import newton_schulz_flops, row_bands

# With two bands of rows or more.
LARGE = {"tall": (1, 1300, 1100), "square": (1, 1024, 1024), "experts": (2, 1030, 1024)}
SHAPES = {"tall": (96, 40), "wide": (24, 80), "square": (48, 48), "experts": (5, 32, 24)}


def rule_of(shape: tuple[int, ...], is_block_matrix: bool = True, **keys: object) -> UpdateRule:
    facts = ParameterFacts("block.weight", torch.Size(shape), len(shape) > 1, is_block_matrix)
    return make_optimizer(MuonTable(**keys)).rule_of(facts)


def buffers_of(rule: UpdateRule, weight: Tensor, momentum: Tensor, gradient: Tensor) -> UpdateBuffers:
    direction = torch.empty(weight.numel(), dtype=torch.bfloat16)
    flat = weight.reshape(-1)
    parts = {"momentum_buffer": momentum.reshape(-1)}
    return UpdateBuffers(rule, EXACT, flat, None, None, flat, parts, gradient.reshape(-1), direction)


def our_step(buffers: UpdateBuffers, shape: tuple[int, ...], lr: float, gradient_scale: float = 1.0) -> None:
    look_ahead_(buffers, gradient_scale)
    assert buffers.direction is not None
    for piece in pieces(buffers.direction, shape):
        piece.host.view(piece.matrices).copy_(orthogonalised(piece.host.view(piece.matrices)))
    update_(buffers, lr=lr, update=1, gradient_scale=gradient_scale)


def their_steps(weight: Tensor, gradients: list[Tensor], table: MuonTable) -> Tensor:
    """Return the weight after steps of `torch.optim.Muon`, which takes each expert as a matrix of its own."""
    stack = weight.clone().reshape(-1, *weight.shape[-2:])
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in stack]
    muon = torch.optim.Muon(
        matrices,
        lr=table.lr,
        weight_decay=table.weight_decay,
        momentum=table.momentum,
        nesterov=table.nesterov,
        adjust_lr_fn=table.adjust_lr,
    )
    for gradient in gradients:
        for matrix, own in zip(matrices, gradient.reshape(stack.shape), strict=True):
            matrix.grad = own.clone()
        muon.step()
    return torch.stack([matrix.detach() for matrix in matrices]).view(weight.shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("keys", [{}, {"nesterov": False}, {"adjust_lr": "original", "weight_decay": 0.0, "lr": 0.02}])
def test_one_step_equals_the_muon_of_torch(shape: tuple[int, ...], keys: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
    table = MuonTable(**keys)
    expected = their_steps(weight, [gradient], table)
    buffers = buffers_of(rule_of(shape, **keys), weight, torch.zeros(shape), gradient)
    our_step(buffers, shape, table.lr)
    found = buffers.written.view(shape)
    # The bound. Both round each operation of fp32 once, in the same order but for a fused one of torch's.
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    "keys", [{}, {"nesterov": False}, {"adjust_lr": "original"}], ids=["nesterov", "momentum", "original"]
)
def test_what_six_steps_move_equals_the_muon_of_torch_if_no_momentum_is_rounded(
    shape: tuple[int, ...], keys: dict[str, object]
) -> None:
    """Whole gradients and a momentum of a half leave nothing to round, so that both orthogonalise the same numbers.

    A rate of 1 makes a step as large as a weight: an error of the step cannot hide in the weight's size.
    """
    generator = torch.Generator().manual_seed(9)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randint(-8, 9, shape, generator=generator).float() for _ in range(6)]
    table = MuonTable(lr=1.0, momentum=0.5, **keys)
    expected = their_steps(start, gradients, table)
    weight, momentum = start.clone(), torch.zeros(shape)
    for gradient in gradients:
        our_step(buffers_of(rule_of(shape, **dict(table)), weight, momentum, gradient), shape, table.lr)
    # Each weight is rounded twice or thrice a step.
    assert (weight - expected).norm() <= 1e-6 * (expected - start).norm()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_twelve_steps_equal_the_muon_of_torch(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(12)]
    table = MuonTable(lr=0.02)
    expected = their_steps(weight, gradients, table)
    start = weight.clone()
    momentum = torch.zeros(shape)
    for gradient in gradients:
        buffers = buffers_of(rule_of(shape, lr=0.02), weight, momentum, gradient)
        our_step(buffers, shape, table.lr)
    # A look-ahead whose last bit differs rounds to another bf16 now and then: 2^-8 is one step of bf16.
    assert (weight - expected).norm() <= 2**-8 * (expected - start).norm()


def test_a_scale_of_the_gradient_is_undone_before_the_momentum() -> None:
    shape, generator = SHAPES["wide"], torch.Generator().manual_seed(7)
    weight, momentum, gradient = (torch.randn(shape, generator=generator) for _ in range(3))
    results = []
    for scale in (1.0, 1024.0):  # a power of two, so that no bit is lost
        buffers = buffers_of(rule_of(shape), weight.clone(), momentum.clone(), gradient * scale)
        our_step(buffers, shape, 3e-4, gradient_scale=1 / scale)
        results.append((buffers.written, buffers.parts["momentum_buffer"]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_look_ahead_leaves_the_momentum_as_it_is() -> None:
    shape = SHAPES["square"]
    momentum = torch.randn(shape)
    before = momentum.clone()
    look_ahead_(buffers_of(rule_of(shape), torch.randn(shape), momentum, torch.randn(shape)), 1.0)
    assert torch.equal(momentum, before)


def test_directions_have_singular_values_near_one() -> None:
    matrices = torch.randn(4, 40, 64, generator=torch.Generator().manual_seed(8)).bfloat16()
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    # Jordan's coefficients leave them between 0.7 and 1.2, and bf16 adds a little.
    assert values.min() > 0.6 and values.max() < 1.3


def test_a_matrix_of_zeros_has_no_direction() -> None:
    assert not orthogonalised(torch.zeros(1, 8, 16, dtype=torch.bfloat16)).any()


@pytest.fixture
def narrow_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut matrices of some hundred rows into five bands."""
    monkeypatch.setattr(update_costs, "LEAST_BAND_ROWS", 32)
    monkeypatch.setattr(update_costs, "BAND_EDGE_ROWS", 8)


BANDED = {"tall": (1, 330, 203), "wide": (1, 170, 500), "square": (1, 256, 256), "experts": (3, 160, 210)}


@pytest.mark.parametrize("shape", BANDED.values(), ids=BANDED.keys())
@pytest.mark.usefixtures("narrow_bands")
def test_products_in_bands_are_those_of_whole_matrices(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Both compute in float64 here, so that a wrong element could not hide behind rounding."""
    assert len(row_bands(min(shape[1:]))) == 5
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    expected = torch.stack([newton_schulz(matrix, torch.float64) for matrix in given])
    # Both ways that devices have: one after the other, and as a batch.
    torch.testing.assert_close(orthogonalised(given), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(iterated_batch(given.double()), expected, rtol=1e-9, atol=1e-12)


def newton_schulz(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Iterate on a whole matrix as `torch.optim.Muon` does, which always computes in bfloat16."""
    a, b, c = COEFFICIENTS
    found = matrix.to(dtype)
    found = found.T if found.shape[0] > found.shape[1] else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found


def iterated_batch(given: Tensor) -> Tensor:
    is_tall = given.shape[-2] > given.shape[-1]
    matrices = given.mT if is_tall else given
    found = iterated(matrices / matrices.flatten(1).norm(dim=1)[:, None, None])
    return found.mT if is_tall else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_bands_round_no_worse_than_whole_matrices(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = torch.randn(shape, generator=torch.Generator().manual_seed(10)).to(dtype)
    exact = [newton_schulz(matrix, torch.float64) for matrix in given]
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.to(dtype, copy=True))
    for matrix, found, wanted in zip(given, orthogonalised(given), exact, strict=True):
        theirs = newton_schulz(matrix, dtype)
        # Both round the same values as often. So their errors are two draws of one size, each the norm of a million
        # roundings: such norms differ by far less than a fifth. A band left out or mirrored wrongly is off by half.
        assert (found - wanted).norm() <= 1.2 * (theirs - wanted).norm()


@pytest.mark.parametrize("shape", [*LARGE.values(), (3, 96, 40)], ids=[*LARGE.keys(), "small stack"])
def test_counted_flops_are_those_of_the_products_that_run(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.zeros(shape, dtype=torch.bfloat16))
    assert counter.get_total_flops() == newton_schulz_flops(shape, STEPS)


def test_bands_cover_the_triangle_and_small_matrices_have_one() -> None:
    assert row_bands(1023) == [(0, 1023)] and row_bands(1024) == [(0, 512), (512, 1024)]
    assert row_bands(4096) == [(0, 768), (768, 1664), (1664, 2432), (2432, 3328), (3328, 4096)]


@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE.keys())
def test_a_piece_takes_no_more_memory_than_is_counted(shape: tuple[int, ...]) -> None:
    given = torch.zeros(shape, dtype=torch.bfloat16)
    assert peak_of_tensors(lambda: iterated_batch(given)) <= scratch_bytes(shape)


def test_a_stack_is_cut_into_pieces_of_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchround.engine.worker.orthogonalise.PIECE_ELEMENTS", 2 * 32 * 24 + 5)
    shape = SHAPES["experts"]
    flat = torch.randn(5 * 32 * 24).bfloat16()
    cut = list(pieces(flat, shape))
    assert [piece.matrices for piece in cut] == [(2, 32, 24), (2, 32, 24), (1, 32, 24)]
    assert torch.equal(torch.cat([piece.host for piece in cut]), flat)
    assert piece_elements(shape) == max(piece.host.numel() for piece in cut)
    assert slot_bytes(shape) == 2 * 2 * 2 * 32 * 24


def test_parameters_outside_blocks_get_adamw_at_their_own_rate() -> None:
    rule = rule_of((64, 32), is_block_matrix=False, lr=0.02, adamw_lr=0.005)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.005, betas=(0.9, 0.95), weight_decay=0.1)
    (parameter,) = adamw.param_groups[0]["params"]
    parameter.grad = torch.tensor([0.5, -2.0, 1e-3])
    gradient, weight = parameter.grad.clone(), parameter.detach().clone()
    adamw.step()
    parts = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    update_(UpdateBuffers(rule, EXACT, weight, None, None, weight, parts, gradient), lr=0.02, update=1)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=0)

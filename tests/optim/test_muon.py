"""Muon's host arithmetic and its matrices, compared with `torch.optim.Muon`."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.kernel_kinds import cut_out
from tests.support.model_tools import peak_of_tensors
from torchround.config.optimizer_tables import MuonTable
from torchround.optim import EXACT, ParameterFacts, UpdateBuffers, make_optimizer, update_
from torchround.optim.rules.muon import COEFFICIENTS, STEPS, iterated, orthogonalised, pieces
from torchround.optim.update_pass import CHUNK_ELEMENTS, look_ahead_
from torchround.planning import update_costs
from torchround.planning.update_costs import newton_schulz_flops, piece_elements, row_bands, scratch_bytes, slot_bytes

NIGHTLY = pytest.mark.nightly
SHAPES = {"tall": (96, 40), "wide": (24, 80), "square": (48, 48), "experts": (5, 32, 24)}


def rule_of(shape, is_block_matrix=True, **keys):
    facts = ParameterFacts("block.weight", torch.Size(shape), len(shape) > 1, is_block_matrix)
    return make_optimizer(MuonTable(**keys)).rule_of(facts)


def buffers_of(rule, weight, momentum, gradient):
    direction = torch.empty(weight.numel(), dtype=torch.bfloat16)
    flat = weight.reshape(-1)
    parts = {"momentum_buffer": momentum.reshape(-1)}
    return UpdateBuffers(rule, EXACT, flat, None, None, flat, parts, gradient.reshape(-1), direction)


def our_step(buffers, shape, lr, gradient_scale=1.0):
    before = buffers.parts["momentum_buffer"].clone()
    look_ahead_(buffers, gradient_scale)
    assert torch.equal(buffers.parts["momentum_buffer"], before), "a look-ahead leaves the momentum as it is"
    assert buffers.direction is not None
    for piece in pieces(buffers.direction, shape):
        piece.copy_(orthogonalised(piece))
    update_(buffers, lr=lr, update=1, gradient_scale=gradient_scale)


def their_steps(weight, gradients, table):
    stack = weight.clone().reshape(-1, *weight.shape[-2:])
    matrices = [torch.nn.Parameter(matrix.clone()) for matrix in stack]
    muon = torch.optim.Muon(
        matrices,
        lr=table.lr,
        weight_decay=table.weight_decay,
        momentum=table.momentum,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for gradient in gradients:
        for matrix, own in zip(matrices, gradient.reshape(stack.shape), strict=True):
            matrix.grad = own.clone()
        muon.step()
    return torch.stack([matrix.detach() for matrix in matrices]).view(weight.shape)


@pytest.mark.parametrize("name", SHAPES)
def test_what_four_steps_move_equals_the_muon_of_torch_if_no_momentum_is_rounded(name):
    """Whole gradients and a momentum of a half are never rounded; at a rate of 1 no error hides in the weight's size."""
    shape, generator = SHAPES[name], torch.Generator().manual_seed(9)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randint(-8, 9, shape, generator=generator).float() for _ in range(4)]
    table = MuonTable(lr=1.0, momentum=0.5, weight_decay=0.0 if name == "square" else 0.1)
    expected = their_steps(start, gradients, table)
    weight, momentum = start.clone(), torch.zeros(shape)
    for gradient in gradients:
        our_step(buffers_of(rule_of(shape, **dict(table)), weight, momentum, gradient), shape, table.lr)
    # Each weight is rounded twice or thrice a step.
    assert (weight - expected).norm() <= 1e-6 * (expected - start).norm()


def test_a_scale_of_the_gradient_is_undone_before_the_momentum():
    shape, generator = SHAPES["wide"], torch.Generator().manual_seed(7)
    weight, momentum, gradient = (torch.randn(shape, generator=generator) for _ in range(3))
    results = []
    for scale in (1.0, 1024.0):  # a power of two, so that no bit is lost
        buffers = buffers_of(rule_of(shape), weight.clone(), momentum.clone(), gradient * scale)
        our_step(buffers, shape, 3e-4, gradient_scale=1 / scale)
        results.append((buffers.written, buffers.parts["momentum_buffer"]))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_look_ahead_of_several_chunks_is_that_of_each_part():
    numel, generator = CHUNK_ELEMENTS + 300, torch.Generator().manual_seed(8)
    weight, momentum, gradient = (torch.randn(numel, generator=generator) for _ in range(3))
    whole, cut = (buffers_of(rule_of((numel, 1)), weight, momentum, gradient) for _ in range(2))
    look_ahead_(whole, 0.7)
    for start, stop in itertools.pairwise((0, 256, CHUNK_ELEMENTS - 256, numel)):
        look_ahead_(cut_out(cut, start, stop), 0.7)
    assert torch.equal(whole.direction, cut.direction)


@pytest.fixture
def narrow_bands(monkeypatch):
    for name, rows in (("LEAST_BAND_ROWS", 32), ("BAND_EDGE_ROWS", 8)):
        monkeypatch.setattr(update_costs, name, rows)


BANDED = {"tall": (1, 330, 203), "wide": (1, 170, 500), "square": (1, 256, 256), "experts": (3, 160, 210)}


@pytest.mark.parametrize("shape", BANDED.values(), ids=BANDED.keys())
@pytest.mark.usefixtures("narrow_bands")
def test_products_in_bands_are_those_of_whole_matrices(monkeypatch, shape):
    """Both compute in float64 here, so that a wrong element could not hide behind rounding."""
    assert len(row_bands(min(shape[1:]))) == 5
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    given = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    expected = torch.stack([newton_schulz(matrix, torch.float64) for matrix in given])
    # Both ways that devices have: one after the other, and as a batch.
    torch.testing.assert_close(orthogonalised(given), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(iterated_batch(given.double()), expected, rtol=1e-9, atol=1e-12)


def newton_schulz(matrix, dtype):
    """Iterate on a whole matrix as `torch.optim.Muon` does, which always computes in bfloat16."""
    a, b, c = COEFFICIENTS
    found = matrix.to(dtype)
    found = found.T if found.shape[0] > found.shape[1] else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if matrix.shape[0] > matrix.shape[1] else found


def iterated_batch(given):
    is_tall = given.shape[-2] > given.shape[-1]
    matrices = given.mT if is_tall else given
    found = iterated(matrices / matrices.flatten(1).norm(dim=1)[:, None, None])
    return found.mT if is_tall else found


@pytest.mark.parametrize("shape", [BANDED["tall"], (3, 24, 10)], ids=["tall", "small stack"])
@pytest.mark.usefixtures("narrow_bands")
def test_counted_flops_are_those_of_the_products_that_run(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.zeros(shape, dtype=torch.bfloat16))
    assert counter.get_total_flops() == newton_schulz_flops(shape, STEPS)


@pytest.mark.usefixtures("narrow_bands")
def test_a_piece_takes_no_more_memory_than_is_counted():
    shape, norms = (2, 262, 256), 1024  # a few numbers for each matrix are not counted
    given = torch.zeros(shape, dtype=torch.bfloat16)
    assert peak_of_tensors(lambda: iterated_batch(given)) <= scratch_bytes(shape) + norms


def test_a_stack_is_cut_into_pieces_of_whole_matrices():
    shape, matrix = (5, 2048, 3000), 2048 * 3000  # two of them are a piece
    cut = list(pieces(torch.empty(5 * matrix, dtype=torch.bfloat16, device="meta"), shape))
    assert [tuple(piece.shape) for piece in cut] == [(2, 2048, 3000), (2, 2048, 3000), (1, 2048, 3000)]
    assert [piece.storage_offset() for piece in cut] == [0, 2 * matrix, 4 * matrix]
    assert piece_elements(shape) == max(piece.numel() for piece in cut)
    assert slot_bytes(shape) == 2 * 2 * 2 * matrix


def test_parameters_outside_blocks_get_adamw_at_their_own_rate():
    rule = rule_of((64, 32), is_block_matrix=False, lr=0.02, adamw_lr=0.005)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.005, betas=(0.9, 0.95), weight_decay=0.1)
    (parameter,) = adamw.param_groups[0]["params"]
    parameter.grad = torch.tensor([0.5, -2.0, 1e-3])
    gradient, weight = parameter.grad.clone(), parameter.detach().clone()
    adamw.step()
    parts = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    update_(UpdateBuffers(rule, EXACT, weight, None, None, weight, parts, gradient), lr=0.02, update=1)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-6, atol=0)

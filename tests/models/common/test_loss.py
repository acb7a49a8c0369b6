"""The chunked loss, the CPU's and the accelerators', against plain cross entropy over all logits."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from tests.support.rounding import BF16, FP16, FP32, assert_close_in_sums
from torchround.engine.engine import forget_variables
from torchround.layer import IGNORED_LABEL
from torchround.models.common import loss


def on_cpu(hidden, weight, labels):
    return loss.loss_in_chunks(hidden, weight, labels, loss.chunk_tokens(len(weight)))


def on_accelerator(hidden, weight, labels, loss_factor=None):
    step = loss.accelerator_chunk_tokens(len(weight), weight.element_size())
    return loss.loss_in_chunks(hidden, weight, labels, step, loss_factor)


IMPLEMENTATIONS = [on_cpu, loss.token_loss_sum, on_accelerator]

TOKENS, WIDTH, VOCAB = 75, 12, 50
# Sums over tokens and vocabulary. Rounding a logit, of WIDTH terms and size up to 15, is a relative error of its exp.
TERMS = TOKENS + VOCAB + 15 * WIDTH
# From bf16 logits on, two things are rounded to bf16: the logits' gradient, and its product with weights or inputs. In
# the norm of a tensor each counts as one rounding of 2^-8 at most (measured 0.0016 to 0.0024 together).
TWO_BF16_ROUNDINGS = 2 * BF16


@pytest.fixture
def limit(monkeypatch):
    def set_limits(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(loss, name, value)

    return set_limits


@pytest.fixture(autouse=True)
def small_chunks(limit):
    """Cut into chunks of 16 tokens, so that the last of five chunks is a partial one, and blocks of three tokens."""
    limit(
        CHUNK_BYTES=16 * 4 * VOCAB, ACCELERATOR_CHUNK_BYTES=16 * 2 * VOCAB, TOKEN_MULTIPLE=8, BLOCK_BYTES=3 * 4 * VOCAB
    )
    assert loss.chunk_tokens(VOCAB) == 16
    assert [loss.accelerator_chunk_tokens(VOCAB, element_bytes) for element_bytes in (2, 4)] == [16, 8]


def make_inputs(ignored=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[list(ignored)] = IGNORED_LABEL
    return hidden, weight, labels


def reference(hidden, weight, labels, scale=1.0, logits_dtype=torch.float64):
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.T
    logits = logits + (logits.to(logits_dtype).double() - logits).detach()  # rounding has the derivative 1
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED_LABEL)
    (scale * total).backward()
    return total.detach(), hidden.grad, weight.grad


def relative_error(found, expected):
    return (found.double() - expected).norm() / expected.norm()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "ignored", [(), range(16, 32), range(TOKENS)], ids=["none ignored", "a whole chunk ignored", "all ignored"]
)
def test_loss_and_gradients_equal_plain_cross_entropy(implementation, ignored):
    hidden, weight, labels = make_inputs(ignored)
    with torch.no_grad():
        evaluated = implementation(hidden, weight, labels)
    total = implementation(hidden, weight, labels)
    assert torch.equal(evaluated, total.detach()) and not evaluated.requires_grad
    (total / 7).backward()
    expected = reference(hidden, weight, labels, scale=1 / 7)
    assert total.dtype == torch.float32
    for found, wanted in zip((total.detach(), hidden.grad, weight.grad), expected, strict=True):
        assert_close_in_sums(found.double(), wanted, TERMS)
    assert torch.equal(hidden.grad[labels == IGNORED_LABEL], torch.zeros(len(ignored), WIDTH))


@pytest.mark.parametrize("implementation", [on_cpu, on_accelerator])
def test_bf16_loss_is_fp32_and_as_exact_as_its_bf16_logits(implementation):
    hidden, weight, labels = make_inputs(ignored=(3, 4), dtype=torch.bfloat16)
    total = implementation(hidden, weight, labels)
    total.backward()
    # The logits, of size up to 15, are rounded to bf16: 8 bits, 0.03 on the largest, unbiased over 73 tokens.
    expected, _, _ = reference(hidden, weight, labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.detach().double(), expected, rtol=2e-3, atol=0)
    _, *wanted = reference(hidden, weight, labels, logits_dtype=torch.bfloat16)
    assert relative_error(hidden.grad, wanted[0]) < TWO_BF16_ROUNDINGS
    assert relative_error(weight.grad, wanted[1]) < TWO_BF16_ROUNDINGS
    if implementation is on_cpu:
        weight.grad = None
        weight.grad_dtype = torch.float32
        weight.grad = preset = torch.zeros(weight.shape)
        for _ in range(2):
            on_cpu(hidden.detach().requires_grad_(), weight, labels).backward()
        assert weight.grad is preset and relative_error(preset, 2 * wanted[1]) < TWO_BF16_ROUNDINGS
        # Five chunks of bf16 products were added in fp32: the sums are not bf16 numbers.
        assert not torch.equal(preset, preset.bfloat16().float())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_frozen_projection_still_passes_gradients_down(implementation):
    hidden, weight, labels = make_inputs()
    _, expected, _ = reference(hidden, weight, labels)
    weight.requires_grad_(False)
    implementation(hidden, weight, labels).backward()
    assert_close_in_sums(hidden.grad.double(), expected, TERMS)
    assert weight.grad is None


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"),
    [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float16, torch.float32)],
)
def test_a_promised_factor_adds_to_the_weights_gradient_in_the_forward(dtype, sum_dtype):
    hidden, weight, labels = make_inputs(ignored=(7,), dtype=dtype)
    _, *wanted = reference(hidden, weight, labels, scale=1 / 73, logits_dtype=dtype)
    weight.grad_dtype = sum_dtype
    weight.grad = torch.ones(weight.shape, dtype=sum_dtype)
    preset = weight.grad
    with torch.no_grad():
        on_accelerator(hidden, weight, labels, loss_factor=1 / 73)
    assert torch.equal(preset, torch.ones_like(preset)), "an evaluation adds nothing"
    total = on_accelerator(hidden, weight, labels, loss_factor=1 / 73)
    added = preset.float() - 1.0
    total.backward(torch.tensor(1 / 73))
    assert weight.grad is preset
    assert torch.equal(preset.float() - 1.0, added), "the backward adds nothing to it"
    unit = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
    assert_close_in_sums(hidden.grad.double(), wanted[0], TERMS, unit=unit[dtype])
    # Each chunk is added to numbers near 1.
    assert_close_in_sums(added.double(), wanted[1], TERMS, unit=max(unit[dtype], unit[sum_dtype]), scale=1.0)


@pytest.mark.parametrize("implementation", [on_cpu, on_accelerator])
def test_a_second_backward_is_refused(implementation):
    total = implementation(*make_inputs())
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        total.backward()


@pytest.mark.parametrize(("implementation", "dtype"), [(on_cpu, torch.bfloat16), (loss.token_loss_sum, torch.float32)])
def test_memory_is_one_chunk_of_logits_and_the_gradients(implementation, dtype, limit, tools):
    tokens, width, vocab = 1024, 16, 512
    limit(CHUNK_BYTES=64 * 4 * vocab)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    peak_bytes = tools.measure_peak_bytes(lambda: implementation(hidden, weight, labels).backward())
    gradients = 4 * (hidden.numel() + 2 * weight.numel()) + 2 * 4 * weight.numel()
    # Chunk logits in the projection's dtype, in fp32, and their gradient: three, and a quarter of room.
    assert peak_bytes < gradients + 3.25 * 64 * 4 * vocab
    assert peak_bytes < tokens * vocab * 4 / 3, "a third of what all logits would take"


def test_the_accelerators_scratch_is_one_chunk_of_logits(limit, tools):
    tokens, width, vocab = 1024, 16, 2048
    limit(ACCELERATOR_CHUNK_BYTES=64 * 4 * vocab, BLOCK_ROWS=256, BLOCK_BYTES=4 * 4 * vocab)
    # float32, because the CPU's products of bf16 matrices take scratch of their own.
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    weight.grad = torch.zeros(weight.shape)
    labels = torch.randint(0, vocab, (tokens,))
    peak_bytes = tools.measure_peak_bytes(
        lambda: on_accelerator(hidden, weight, labels, 0.5).backward(torch.tensor(0.5))
    )
    counted = loss.loss_work(tokens, vocab, width, 4, trained=True, device="cuda").workspace_bytes
    assert counted == 64 * 4 * vocab + 256 * 4 * width
    # Besides: the gradient for the hidden states, and a few numbers per token.
    assert counted < peak_bytes < counted + hidden.nbytes + 64 * tokens
    # A whole gradient of the weight beside its sum would not fit into that.
    assert weight.nbytes > 64 * tokens


def test_a_fault_inside_the_loss_keeps_no_tensor_alive(monkeypatch):
    """As after any fault: the engine clears the variables of the frames, and device memory must then be free."""

    def full(*_):
        raise MemoryError("planted")

    def fault():
        hidden = torch.randn(64, 16, dtype=torch.bfloat16, requires_grad=True) * 2
        weight = torch.randn(50, 16, dtype=torch.bfloat16, requires_grad=True)
        found.append(weakref.ref(hidden))
        try:
            loss.token_loss_sum(hidden, weight, torch.zeros(64, dtype=torch.int64))
        except MemoryError as error:
            return error

    found = []
    monkeypatch.setattr(loss, "softmax_loss_", full)
    error = fault()
    forget_variables(error)
    gc.collect()
    assert found[0]() is None and error is not None

"""Cases for Triton's interpreter: softmax, loss and gradient over the logits."""

import torch

from tests.support.interpreted import UNITS
from tests.support.rounding import FP32, assert_close_in_sums
from torchround.layer import IGNORED_LABEL
from torchround.models.kernels.softmax_loss import reference_softmax_loss_

FACTOR = 0.37
# One column; one partial step of 8192, one whole step, and several with a partial last one.
VOCABULARIES = (1, 50, 8192, 2 * 8192 + 77)


def kernel(logits, labels, losses, factor, differentiate):
    from torchround.models.kernels.softmax_loss_triton import COLUMNS, launch_softmax_loss

    assert COLUMNS in VOCABULARIES, "the vocabularies are chosen by the kernel's step"
    launch_softmax_loss(logits, labels, losses, factor, differentiate)


def inputs(tokens, vocab, dtype):
    """Logits with a gap between rows, and labels of which one is ignored, except of a single token."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(tokens, vocab + 8, generator=generator)).to(dtype)[:, :vocab]
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    if tokens > 1:
        labels[tokens // 2] = IGNORED_LABEL
    return logits, labels


def both(tokens, vocab, dtype, differentiate):
    """Return what the kernel and its reference make of the same logits, losses and logits each; and the labels."""
    results = []
    for compute in (kernel, reference_softmax_loss_):
        logits, labels = inputs(tokens, vocab, dtype)
        losses = torch.full((tokens,), torch.nan)
        compute(logits, labels, losses, FACTOR, differentiate)
        results.append((losses, logits))
    return results, labels


def case_losses_and_gradients_equal_the_reference():
    for dtype, unit in UNITS.items():
        for vocab in VOCABULARIES:
            for tokens in (1, 3):
                [(losses, logits), (expected_losses, expected)], labels = both(tokens, vocab, dtype, True)
                assert_close_in_sums(losses, expected_losses, vocab, "losses", scale=20.0)
                # Rounded once, and cut by the interpreter. Exponentials of differences up to 30 have that error in fp32.
                assert_close_in_sums(
                    logits.float(), expected.float(), 2, "gradients", unit=max(unit, 32 * FP32), scale=FACTOR
                )
                ignored = labels == IGNORED_LABEL
                assert not logits[ignored].any(), "an ignored label has no gradient"
                assert not losses[ignored].any(), "an ignored label has no loss"


def case_an_evaluation_leaves_the_logits_as_they_are():
    for dtype in UNITS:
        [(losses, logits), (expected_losses, _)], _ = both(3, 50, dtype, False)
        assert torch.equal(logits, inputs(3, 50, dtype)[0])
        assert_close_in_sums(losses, expected_losses, 50, scale=20.0)


def case_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 2.99e4]], dtype=torch.float16)
    losses = torch.empty(1)
    kernel(logits, torch.tensor([2]), losses, 1.0, True)
    expected = 3e4 - float(torch.tensor(2.99e4, dtype=torch.float16))
    assert abs(losses.item() - expected) < 1e-2, losses
    assert logits.isfinite().all()


def case_a_logit_that_is_not_finite_shows_in_the_loss():
    for bad in (torch.nan, torch.inf):
        logits, losses = torch.zeros(2, 9), torch.empty(2)
        logits[1, 4] = bad
        kernel(logits, torch.tensor([1, 1]), losses, 1.0, True)
        assert losses.isfinite().tolist() == [True, False]


def case_no_tokens_launch_nothing():
    kernel(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), torch.empty(0), 1.0, True)

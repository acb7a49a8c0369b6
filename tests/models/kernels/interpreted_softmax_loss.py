"""Checks of the kernel of the loss, run by `test_softmax_loss.py` in Triton's interpreter."""

import torch

from tests.support.interpreted import main
from tests.support.rounding import BF16, FP16, FP32, assert_close_in_sums
from torchround.layer import IGNORED_LABEL
from torchround.models.kernels.softmax_loss import reference_softmax_loss_
from torchround.models.kernels.softmax_loss_triton import COLUMNS, launch_softmax_loss

UNITS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
FACTOR = 0.37
# One column, one partial step, one whole step, and several with a partial last one.
VOCABULARIES = (1, 50, COLUMNS, 2 * COLUMNS + 77)


def inputs(tokens, vocab, dtype):
    """Logits with a gap between rows, and labels of which one is ignored, except of a single token."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(tokens, vocab + 8, generator=generator)).to(dtype)[:, :vocab]
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    if tokens > 1:
        labels[tokens // 2] = IGNORED_LABEL
    return logits, labels


def both(tokens, vocab, dtype, differentiate):
    """What the kernel and its reference make of the same logits: losses and logits each."""
    results = []
    for compute in (launch_softmax_loss, reference_softmax_loss_):
        logits, labels = inputs(tokens, vocab, dtype)
        losses = torch.full((tokens,), torch.nan)
        compute(logits, labels, losses, FACTOR, differentiate)
        results.append((losses, logits))
    return *results, labels


def check_losses_and_gradients_equal_the_reference():
    for dtype, unit in UNITS.items():
        for vocab in VOCABULARIES:
            for tokens in (1, 3):
                (losses, logits), (expected_losses, expected), labels = both(tokens, vocab, dtype, True)
                assert_close_in_sums(losses, expected_losses, vocab, "losses", scale=20.0)
                # The result is rounded once; exponentials of differences up to 30 have that error in fp32.
                assert_close_in_sums(
                    logits.float(), expected.float(), 2, "gradients", unit=max(unit, 32 * FP32), scale=FACTOR
                )
                ignored = labels == IGNORED_LABEL
                assert not logits[ignored].any(), "an ignored label has no gradient"
                assert not losses[ignored].any(), "an ignored label has no loss"


def check_an_evaluation_leaves_the_logits_as_they_are():
    for dtype in UNITS:
        (losses, logits), (expected_losses, _), _ = both(3, 50, dtype, False)
        assert torch.equal(logits, inputs(3, 50, dtype)[0])
        assert_close_in_sums(losses, expected_losses, 50, scale=20.0)


def check_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 2.99e4]], dtype=torch.float16)
    losses = torch.empty(1)
    launch_softmax_loss(logits, torch.tensor([2]), losses, 1.0, True)
    expected = 3e4 - float(torch.tensor(2.99e4, dtype=torch.float16))
    assert abs(losses.item() - expected) < 1e-2, losses
    assert logits.isfinite().all()


def check_a_logit_that_is_not_finite_shows_in_the_loss():
    for bad in (torch.nan, torch.inf):
        logits, losses = torch.zeros(2, 9), torch.empty(2)
        logits[1, 4] = bad
        launch_softmax_loss(logits, torch.tensor([1, 1]), losses, 1.0, True)
        assert losses.isfinite().tolist() == [True, False]


def check_no_tokens_launch_nothing():
    launch_softmax_loss(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), torch.empty(0), 1.0, True)


if __name__ == "__main__":
    main(globals())

"""What an accelerator's head moves and compiles."""

import torch

from benchmarks.kernel_counts import CountingMode
from torchround.accelerators import as_if_on
from torchround.models.common import loss

VOCAB, WIDTH, TOKENS = 151936, 2048, 8192  # Qwen3-1.7B, a micro-batch of four sequences


def test_the_head_moves_at_most_25_gb_in_all():
    """On `meta`, as on a card, with the weight's gradient where the engine has it."""
    hidden = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(VOCAB, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight.grad_dtype = torch.float32
    weight.grad = torch.empty(VOCAB, WIDTH, device="meta")
    labels = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    with as_if_on("cuda"), CountingMode() as mode:
        total = loss.token_loss_sum(hidden, weight, labels, 0.1)
        total.backward(torch.empty_like(total))
    assert mode.counted.elementwise_bytes + mode.counted.product_bytes < 25e9
    assert "mul_" not in mode.counted.by_name(), "no pass multiplies finished gradients"

"""Layers draw from seeds of their own: repeatable, apart from PyTorch's default generator and from other threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchround.library.seeds import INFERENCE, UnseededDrawError, drawing, layer_seed

DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.5, True),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape, dtype=torch.float64),
    "rand_like": torch.rand_like,
    "randint": lambda x: torch.randint(9, x.shape),
    "randint from": lambda x: torch.randint(3, 9, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randperm": lambda x: torch.randperm(100),
    "normal": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 4),
    "gumbel": functional.gumbel_softmax,
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "LSTM": lambda x: nn.LSTM(20, 4, 2, dropout=0.5)(x)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_operations_draw_from_the_seed_and_leave_the_default_generator_alone(name):
    x = torch.linspace(-1, 1, 200).reshape(10, 20)
    before = torch.get_rng_state()

    def draw(seed):
        with drawing(seed):
            return DRAWS[name](x)

    one, again, other = draw(1), draw(1), draw(2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_that_draw_at_once_do_not_disturb_each_other():
    def draw(seed):
        with drawing(seed):
            return [torch.rand(1000) for _ in range(20)]

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, range(4)))
    assert all(
        torch.equal(a, b) for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_a_draw_that_cannot_be_seeded_is_refused():
    with drawing(0), pytest.raises(UnseededDrawError, match="generator of its own"):
        torch.rand(3, generator=torch.Generator())
    with drawing(0):  # without dropout attention draws nothing
        functional.scaled_dot_product_attention(*torch.randn(3, 2, 3, 4, 5))
    with drawing(0), pytest.raises(UnseededDrawError, match="takes no generator"):
        torch.native_dropout(torch.ones(3), 0.5, True)


def test_seeds_differ_by_call_micro_batch_layer_and_seed():
    found = [
        layer_seed(s, c, m, i)
        for s in range(3)
        for c in (0, 1, 2, INFERENCE, INFERENCE + 1)
        for m in range(5)
        for i in range(5)
    ]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 2**63 for seed in found)

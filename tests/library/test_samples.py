"""Batches are cut into micro-batches and outputs joined again, and layers draw from seeds of their own."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchround.engine.errors import EngineUsageError
from torchround.library.sample_batch import cut, joined
from torchround.library.seeds import INFERENCE, drawing, layer_seed


def pieces(inputs, labels=None, num_micro_batches=3):
    batches = cut(inputs, labels, num_micro_batches, None, is_training=False, seed=0, call=0)
    return [batch.inputs_and_labels() for batch in batches]


def test_tensors_are_cut_along_dimension_0_and_plain_values_go_to_all():
    image, mask, scale = torch.arange(14).reshape(7, 2), torch.arange(7) > 3, torch.tensor(2.0)
    assert len(pieces(torch.zeros(2, 5), num_micro_batches=4)) == 2
    found = pieces({"image": image, "rest": (mask, [scale, "text", None])}, torch.arange(7))
    assert [len(labels) for _, labels in found] == [3, 2, 2]
    assert torch.equal(torch.cat([inputs["image"] for inputs, _ in found]), image)
    assert torch.equal(torch.cat([inputs["rest"][0] for inputs, _ in found]), mask)
    assert all(inputs["rest"][1] == [scale, "text", None] for inputs, _ in found)


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def test_rebuilt_on_a_device_a_batch_keeps_its_structure_and_none_of_its_tensors():
    inputs = Pair(torch.randn(4, 2), torch.randn(4))
    [batch] = cut(inputs, [torch.ones(4)], 1, None, is_training=True, seed=0, call=0)
    again = batch.rebuild()([tensor * 2 for tensor in batch.tensors()])
    found, labels = again.inputs_and_labels()
    assert isinstance(found, Pair) and torch.equal(found.other, 2 * inputs.other)
    assert torch.equal(labels[0], torch.full((4,), 2.0))


@pytest.mark.parametrize(
    ("inputs", "labels", "count", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(5), 2, r"\[4, 5\] samples"),
        ({"a": torch.zeros(4), "b": [torch.zeros(3)]}, None, 2, r"\[3, 4\] samples"),
        (torch.zeros(0, 2), None, 2, r"\[0\] samples"),
        (3.0, torch.zeros(4), 2, "one of them in the inputs"),
        (torch.tensor(3.0), None, 2, "one of them in the inputs"),
        (torch.zeros(4, requires_grad=True), None, 2, "detach them"),
    ],
)
def test_a_batch_whose_tensors_do_not_fit_is_refused(inputs, labels, count, message):
    with pytest.raises(EngineUsageError, match=message):
        pieces(inputs, labels, count)


def test_outputs_are_joined_leaf_by_leaf():
    first = {"x": torch.zeros(2, 3), "mean": torch.tensor(1.0), "seq": torch.zeros(5, 2), "kind": "a"}
    second = {"x": torch.ones(1, 3), "mean": torch.tensor(2.0), "seq": torch.ones(5, 1), "kind": "b"}
    found = joined([first, second], [2, 1])
    assert torch.equal(found["x"], torch.cat([first["x"], second["x"]]))
    assert found["mean"] == [torch.tensor(1.0), torch.tensor(2.0)]
    assert [part.shape for part in found["seq"]] == [(5, 2), (5, 1)]
    assert found["kind"] == ["a", "b"]


# Layers draw from seeds of their own: repeatable, apart from PyTorch's default generator and from other threads.
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
            return torch.stack([torch.rand(1000) for _ in range(20)])

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(draw, range(4)))
    assert all(map(torch.equal, alone, together))


def test_a_draw_that_cannot_be_seeded_is_refused():
    with drawing(0):  # without dropout attention draws nothing
        functional.scaled_dot_product_attention(*torch.randn(3, 2, 3, 4, 5))
    with drawing(0), pytest.raises(RuntimeError, match="takes no generator"):
        torch.native_dropout(torch.ones(3), 0.5, True)


def test_seeds_differ_by_call_micro_batch_layer_and_seed():
    calls = (0, 1, 2, INFERENCE, INFERENCE + 1)
    found = [layer_seed(*each) for each in product(range(3), calls, range(5), range(5))]
    assert len(set(found)) == len(found)
    assert all(0 <= seed < 2**63 for seed in found)

"""Whole models on the way of an accelerator without Triton: on the CPU, which is made to take it, and through the engine."""

import pytest
import torch

from tests.support import plain_flash
from tests.support.interpreted import random
from tests.support.rounding import assert_close_in_sums
from tests.support.small_decoders import decoder
from torchround.models.common import attention
from torchround.planning.partition import Partition

CASES = [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]
PARTITION = Partition((1, 2), 1, (1, 1, 1))  # embedding; two blocks; head, and back one by one
# Other documents at the same place of a round, so that offsets of an earlier micro-batch would be seen.
CUTS = [[[[12, 20], [32]], [[32]], [[7, 25]]], [[[3, 29], [9, 23]], [[16, 16]], [[32]]]]


@pytest.fixture
def offsets_kernel(monkeypatch):
    monkeypatch.setattr(attention, "has_offset_attention", lambda device, dtype, head_dim: True)
    plain_flash.install(monkeypatch)


def loss_and_gradients(model, batch, tools):
    for parameter in tools.stored_parameters(model).values():
        parameter.grad = None
    loss = tools.loss_sum(model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in tools.stored_parameters(model).items()}


@pytest.mark.parametrize("name, flavor", CASES, ids=map("-".join, CASES))
def test_a_model_on_an_accelerators_way_computes_what_the_plain_one_does(name, flavor, tools, request):
    model = decoder(name, flavor, vocab_size=50, num_layers=2)
    tools.materialise(model)
    for parameter in tools.stored_parameters(model).values():
        with torch.no_grad():
            parameter += 0.1 * random(*parameter.shape)  # norms that are not 1, biases and sinks that are not 0
    batch = tools.micro_batch([[12, 20], [32]], 50)
    plain = loss_and_gradients(model, batch, tools)
    request.getfixturevalue("fused")
    found = loss_and_gradients(model, batch, tools)
    # Terms of the sums on the path: each product adds up over its inputs forward and over its outputs backward, each
    # gradient of a weight over 64 tokens, and attention over 32.
    weights = [parameter for layer in model.layers for parameter in layer.parameters() if parameter.ndim > 1]
    terms = sum(sum(weight.shape[-2:]) for weight in weights) + 2 * len(model.layers) * (64 + 2 * 32)
    assert_close_in_sums(found[0], plain[0], terms)
    for path, expected in plain[1].items():
        assert_close_in_sums(found[1][path], expected, terms, path)


@pytest.mark.parametrize("name, flavor", CASES[2:], ids=map("-".join, CASES[2:]))
def test_training_is_bitwise_that_of_a_plain_loop(name, flavor, fused, offsets_kernel, train_as_a_loop):
    """Recomputation, two workers and later rounds see each micro-batch's own offsets."""
    train_as_a_loop(decoder(name, flavor, vocab_size=50, num_layers=2), PARTITION, *CUTS)

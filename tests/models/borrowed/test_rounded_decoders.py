"""A borrowed model in bf16 beside the model of `transformers` in bf16: both are as far from fp32."""

import copy

import pytest
import torch

from tests.support.toy_decoders import VOCAB
from tests.support.transformers_loop import document_logits, loss_sum, make_pair


@pytest.fixture(scope="module", params=["gemma2"])  # a scaled embedding, windows and capped logits
def pair(request, tools):
    return make_pair(tools, request.param)


@pytest.fixture(scope="module")
def rounded(pair, tools):
    """Return the model of `transformers` and ours with bf16 weights; buffers stay in fp32, as when files are loaded."""
    theirs = copy.deepcopy(pair.theirs)
    for parameter in theirs.parameters():
        parameter.data = parameter.data.bfloat16()
    ours = tools.materialise(pair.build(), torch.bfloat16)
    tools.load_hf_weights(ours, pair.names, theirs)
    return theirs, ours


def test_logits_are_as_close_to_fp32_as_those_of_transformers(pair, rounded, tools):
    theirs, ours = rounded
    batch = tools.micro_batch([[13, 1, 10], [24]], VOCAB)
    with torch.no_grad():
        exact = document_logits(pair.theirs, batch)
        their_error = (document_logits(theirs, batch) - exact).norm()
        our_error = (tools.all_logits(ours, batch) - exact).norm()
    assert our_error > 0
    # The same modules round in the same places, so twice would be an error of another kind.
    assert our_error < 2 * their_error


def test_gradients_are_as_close_to_fp32_as_those_of_transformers(pair, rounded, tools):
    theirs, ours = rounded
    batch = tools.micro_batch([[13, 1, 10], [24]], VOCAB)
    exact_model = copy.deepcopy(pair.theirs)
    for model in (exact_model, theirs):
        loss_sum(model, batch).backward()
    exact, their = tools.released_gradients(exact_model), tools.released_gradients(theirs)
    tools.loss_sum(ours, batch).backward()
    errors = []
    for name, parameter in tools.stored_parameters(ours).items():
        expected = tools.gather(pair.names[name], exact)
        found = parameter.grad.float(), tools.gather(pair.names[name], their).float()
        errors.append([((gradient - expected).norm() / expected.norm()).item() for gradient in found])
    our_mean, their_mean = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    assert 0 < our_mean < 2 * their_mean

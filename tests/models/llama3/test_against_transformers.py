"""Llama 3 layers against `transformers`, with small random weights of awkward shapes, in fp32."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models import FAMILIES
from torchround.layer import IGNORED_LABEL

LLAMA3 = FAMILIES["llama3"]
SCALED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "three heads per kv head, wide heads, scaled rope": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_size": 36,
        "rope_parameters": SCALED_ROPE,
    },
    "five heads per kv head, narrow heads, tied": {
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "hidden_size": 40,
        "tie_word_embeddings": True,
        "rope_parameters": SCALED_ROPE,
    },
    "no grouping, plain rope": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def pair(request, tools):
    """A transformers model and ours with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=61, intermediate_size=52, num_hidden_layers=3, **request.param)
    # Weights ten times the usual size, so that attention is far from uniform and rotations matter.
    config.initializer_range = 0.2
    theirs = LlamaForCausalLM(config)
    ours_config = LLAMA3.config_from_hf(config.to_dict())
    ours = tools.materialise(LLAMA3.build(ours_config))
    state, stored = theirs.state_dict(), tools.stored_parameters(ours)
    with torch.no_grad():
        for name, hf_name in LLAMA3.hf_names(ours_config).items():
            stored[name].copy_(state[hf_name])
    return theirs, ours, ours_config


def test_logits_and_loss_equal_those_of_transformers(pair, tools):
    theirs, ours, config = pair
    batch = tools.micro_batch([[40], [40]], config.vocab_size)
    expected = theirs(input_ids=batch.tokens).logits
    logits = ours.layers[-1].logits(tools.hidden_before_head(ours, batch))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    torch.testing.assert_close(tools.loss_sum(ours, batch), loss, rtol=1e-5, atol=0)


def test_gradients_equal_those_of_transformers(pair, tools):
    theirs, ours, config = pair
    batch = tools.micro_batch([[40], [40]], config.vocab_size)
    logits = theirs(input_ids=batch.tokens).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum").backward()
    tools.loss_sum(ours, batch).backward()
    expected = dict(theirs.named_parameters())
    stored = tools.stored_parameters(ours)
    for name, hf_name in LLAMA3.hf_names(config).items():
        error = (stored[name].grad - expected[hf_name].grad).norm() / expected[hf_name].grad.norm()
        assert error < 1e-4, f"{name}: relative error {error}"


def test_hf_names_are_a_bijection_onto_the_released_tensors(pair, tools):
    theirs, ours, config = pair
    names, stored = LLAMA3.hf_names(config), tools.stored_parameters(ours)
    # named_parameters lists a tied tensor once, as a released file does.
    released = {name: tuple(tensor.shape) for name, tensor in theirs.named_parameters()}
    assert names.keys() == stored.keys()
    assert sorted(names.values()) == sorted(released)
    assert {names[ours_name]: tuple(p.shape) for ours_name, p in stored.items()} == released


def test_documents_of_a_packed_batch_equal_transformers_run_one_by_one(pair, tools):
    theirs, ours, config = pair
    batch = tools.micro_batch([[7, 1, 32], [20, 15, 5]], config.vocab_size)
    total = torch.zeros(())
    for row in range(2):
        for document in batch.document_ids[row].unique():
            chosen = batch.document_ids[row] == document
            labels = batch.labels[row][chosen]
            if (labels == IGNORED_LABEL).all():
                continue
            logits = theirs(input_ids=batch.tokens[row][chosen][None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(tools.loss_sum(ours, batch), total, rtol=1e-5, atol=0)

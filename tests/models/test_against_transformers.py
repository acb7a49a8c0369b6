"""Models against `transformers`, in fp32 and bf16: our own families at awkward shapes, and borrowed ones at toy size.

Awkward: kv groups of three and five, head_dim apart from hidden / heads, tied and untied, scaled RoPE. Batches are packed,
and the reference runs each document alone.
"""

import copy

import pytest
import torch

from tests.support.toy import toy_engine, train
from tests.support.toy_decoders import VOCAB, toy_config, toy_decoder
from tests.support.transformers_loop import (
    LR,
    MAX_NORM,
    assert_close_in_norm,
    compare,
    document_logits,
    loss_sum,
    make_pair,
    packed_steps,
    pair_of,
    reference_training,
    store_of,
)
from torchround.planning.partition import Partition

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0}
YARN_ROPE |= {"original_max_position_embeddings": 32}
THREES = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 36}
FIVES = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6, "hidden_size": 40}
EQUAL = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 24}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SINKS = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 1.0}
# The embedding of a padding token gets no gradient in transformers; our own families train it like any other token.
USUAL = {"vocab_size": VOCAB + 3, "intermediate_size": 52, "num_hidden_layers": 3, "pad_token_id": None}

OWN = {
    "llama3": ("llama", THREES | {"rope_parameters": LLAMA3_ROPE}),
    "llama3, tied": ("llama", FIVES | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama3, plain rope": ("llama", EQUAL),
    "qwen3": ("qwen3", THREES | {"use_sliding_window": False}),
    "qwen3, tied": ("qwen3", FIVES | {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen3 with experts": ("qwen3_moe", THREES | EXPERTS | {"norm_topk_prob": True}),
    "qwen3 with experts, weights not normalised, tied": (
        "qwen3_moe",
        FIVES | EXPERTS | {"norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "gpt_oss": ("gpt_oss", THREES | SINKS | {"rope_parameters": YARN_ROPE | {"truncate": False}, "layer_types": None}),
    "gpt_oss, yarn bounds rounded, tied": (
        "gpt_oss",
        FIVES | SINKS | {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True, "layer_types": None},
    ),
}
# Windows and capped logits; experts; linear attention.
BORROWED = ("gemma2", "qwen3_moe", "qwen3_next")
OTHERS = ("qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "glm4", "smollm3", "qwen3_5_text")
AT_NIGHT = ("llama3, plain rope", "qwen3, tied", *OTHERS)
NIGHT = pytest.mark.nightly
NAMES = [pytest.param(name, marks=NIGHT if name in AT_NIGHT else ()) for name in (*OWN, *BORROWED, *OTHERS)]


def pair_named(name, tools, **settings):
    if name not in OWN:
        return make_pair(tools, name)
    model_type, own = OWN[name]
    return pair_of(tools, toy_decoder(toy_config(model_type, **USUAL | own | settings)), name.split()[0].rstrip(","))


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tools):
    return pair_named(request.param, tools)


def test_logits_loss_and_gradients_of_packed_documents_equal_those_of_each_document_alone(pair):
    compare(pair)


# Tied scaled rotations, sinks, linear attention. The gradients of the other models are compared above.
@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(name, marks=[NIGHT] * (name not in ("llama3, tied", "gpt_oss", "qwen3_next")))
        for name in (*OWN, *BORROWED, *OTHERS)
    ],
    indirect=True,
)
def test_adamw_steps_of_the_engine_equal_those_of_transformers(pair, tools):
    """The engine runs stages of its own on two devices; torch.optim trains the whole model."""
    steps = packed_steps(tools, 2, sequences=1)
    store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
    layers = len(model.layers)
    partition = Partition((1, layers - 4), 3, (layers - 4, 1))
    with toy_engine(partition, 2, model=model, store=store, max_norm=MAX_NORM) as engine:
        losses = train(engine, steps, LR)
    theirs = copy.deepcopy(pair.theirs)
    assert losses == pytest.approx(reference_training(theirs, steps), rel=1e-5)
    released = tools.released_tensors(theirs)
    # An update changes a weight by at most lr / eps = 1 per unit of gradient. Gradients are clipped to a norm of 1, and
    # their elements agree to 1e-5 (sums of some hundred terms, 2^-24 each).
    for name, weight in store.weights().items():
        torch.testing.assert_close(weight, tools.gather(pair.names[name], released), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=NIGHT) for n in ("llama3", "qwen3", "gpt_oss")), "qwen3 with experts", "gemma2"]
)
def test_bf16_is_as_close_to_fp32_as_transformers_is(name, tools):
    pair = pair_named(name, tools)
    theirs = copy.deepcopy(pair.theirs)
    for parameter in theirs.parameters():  # buffers stay in fp32, as when files are loaded
        parameter.data = parameter.data.bfloat16()
    # Its grouped product refuses bf16 rows of these odd widths.
    theirs.set_experts_implementation("eager")
    ours = tools.materialise(pair.build(), torch.bfloat16)
    tools.load_hf_weights(ours, pair.names, theirs)
    logits, gradients = [], []
    for seed in range(2):
        batch = tools.micro_batch([[13, 1, 10], [24]], VOCAB, seed=seed)
        with torch.no_grad():
            exact = document_logits(pair.theirs, batch)
            found = tools.all_logits(ours, batch), document_logits(theirs, batch)
            logits.append(torch.stack([(each - exact).norm(dim=-1).flatten() for each in found]))
        gradients.append(gradient_errors(pair, ours, theirs, batch, tools))
    # A rounding may give a token another expert, which changes all that follow it, in our model or in theirs. So the least
    # disturbed quarter of the tokens is compared, and each parameter's least disturbed batch.
    our_error, their_error = torch.cat(logits, dim=1).quantile(0.25, dim=1)
    # Ours rounds less often (rotations, norms, routing weights), borrowed modules in the same places.
    assert 0 < our_error < 1.2 * their_error
    our_mean, their_mean = torch.stack(gradients).amin(dim=0).mean(dim=0)
    # Both round to bf16 in about as many places, so the means are alike: twice would be an error of another kind.
    assert 0 < our_mean < 2 * their_mean


def gradient_errors(pair, ours, theirs, batch, tools):
    """Return the error of each parameter's gradient, relative to its norm in fp32: of our model and of theirs in bf16."""
    for model in (pair.theirs, theirs, *ours.layers):
        model.zero_grad()
    for model in (pair.theirs, theirs):
        loss_sum(model, batch).backward()
    tools.loss_sum(ours, batch).backward()
    exact, their, errors = tools.released_gradients(pair.theirs), tools.released_gradients(theirs), []
    for key, parameter in tools.stored_parameters(ours).items():
        expected = tools.gather(pair.names[key], exact)
        found = parameter.grad.float(), tools.gather(pair.names[key], their).float()
        errors.append([((gradient - expected).norm() / expected.norm()).item() for gradient in found])
    return torch.tensor(errors)


def test_balance_penalty_and_its_gradients_equal_those_of_transformers(tools):
    pair = pair_named("qwen3 with experts", tools, output_router_logits=True, router_aux_loss_coef=0.5)
    batch = tools.micro_batch([[40]], VOCAB)  # one sequence: transformers mixes the sequences of a batch
    output = pair.theirs(input_ids=batch.tokens)
    cross_entropy = loss_sum(pair.theirs, batch)
    (cross_entropy + 0.5 * output.aux_loss * batch.num_labels()).backward()
    loss = tools.loss_sum(pair.ours, batch)
    loss.backward()
    penalty = (loss - cross_entropy) / batch.num_labels()
    torch.testing.assert_close(penalty, 0.5 * output.aux_loss, rtol=1e-4, atol=0)
    gradients = tools.released_gradients(pair.theirs)
    for name, parameter in tools.stored_parameters(pair.ours).items():
        assert_close_in_norm(parameter.grad, tools.gather(pair.names[name], gradients), name)

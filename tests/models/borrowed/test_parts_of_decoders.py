"""The parts that borrowed models are made of: buffers, initial weights, names, the loss of a head, shared arguments."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.toy_decoders import toy_config, toy_decoder
from torchround.layer import IGNORED_LABEL, decayed_names
from torchround.models import FAMILIES
from torchround.models.borrowed import borrowed_family, construction
from torchround.models.borrowed.borrowed_layers import any_loss_sum

FAMILY = FAMILIES["transformers"]


def cut(model_type, **overrides):
    return FAMILY.cut(FAMILY.config_from_hf(toy_config(model_type, **overrides).to_dict()))


OTHERS = [pytest.param(kind, marks=pytest.mark.releases) for kind in ("gpt_neox", "qwen3_next")]


# Rotations, two kinds of them, masks.
@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "gpt2", *OTHERS])
def test_buffers_are_as_transformers_makes_them(model_type):
    whole = cut(model_type).whole
    theirs = dict(toy_decoder(toy_config(model_type)).named_buffers())
    found = dict(whole.named_buffers())
    assert found.keys() == theirs.keys()
    for name, buffer in found.items():
        assert torch.equal(buffer, theirs[name]), name


def test_a_buffer_that_files_hold_is_a_frozen_parameter():
    made = cut("deepseek_v3")
    name = "block.1.mlp.gate.e_score_correction_bias"
    assert made.names.own[name] == "model.layers.1.mlp.gate.e_score_correction_bias"
    parameter = made.layers.layers[2].get_parameter(name.removeprefix("block.1."))
    assert not parameter.requires_grad
    # Rounded to 16 bits it would still compute in fp32, as in transformers.
    assert made.layers.own_dtypes[name] == torch.float32


@pytest.mark.usefixtures("cut_anew")
def test_a_model_is_cut_once_for_its_layers_and_all_its_names(monkeypatch):
    cuts = []
    monkeypatch.setattr(
        borrowed_family, "take_apart", lambda config: cuts.append(config) or construction.take_apart(config)
    )
    one, other = (FAMILY.config_from_hf(toy_config("qwen2", num_hidden_layers=n).to_dict()) for n in (2, 3))
    assert FAMILY.build(one) is not FAMILY.build(one), "layers are changed by what runs them"
    names = FAMILY.module_names(one)
    assert FAMILY.names_in_folder(one, ()).names == FAMILY.hf_names(one) == names and len(cuts) == 2
    assert FAMILY.module_names(other) != names and len(cuts) == 3


def test_stacked_biases_are_not_decayed():
    decayed = decayed_names(cut("gpt_oss").layers)
    assert "block.0.mlp.experts.gate_up_proj" in decayed
    assert "block.0.mlp.experts.gate_up_proj_bias" not in decayed


def test_initial_weights_are_the_model_s_own_and_follow_from_the_generator_alone(tools):
    def weights(seed, other):
        torch.manual_seed(other)
        layer = tools.materialise(cut("qwen2", initializer_range=0.5).layers).layers[1]
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        layer.init_weights(torch.Generator().manual_seed(seed))
        return {name: parameter.detach() for name, parameter in layer.named_parameters()}

    first, again, other = weights(1, 0), weights(1, 5), weights(2, 0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["mlp.up_proj.weight"], other["mlp.up_proj.weight"])
    # 1536 numbers: the standard deviation of their spread is 0.5 / sqrt(2 * 1536).
    assert float(first["mlp.up_proj.weight"].std()) == pytest.approx(0.5, abs=6 * 0.5 / 3072**0.5)
    assert torch.equal(first["input_layernorm.weight"], torch.ones(32))
    assert torch.equal(first["self_attn.q_proj.bias"], torch.zeros(32))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_in_chunks_has_the_loss_and_gradients_of_one_piece(frozen):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(50, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator).requires_grad_(not frozen)
    labels = torch.randint(0, 11, (50,), generator=generator)
    labels[::7] = IGNORED_LABEL

    def logits_of(states):
        return 3.0 * torch.tanh(states @ weight.T / 3.0)

    def run(loss):
        hidden.grad = weight.grad = None
        (2.0 * loss).backward()
        return loss.detach(), hidden.grad, weight.grad

    ours = run(any_loss_sum(logits_of, hidden, labels, [weight], 16))
    whole = run(F.cross_entropy(logits_of(hidden), labels, ignore_index=IGNORED_LABEL, reduction="sum"))
    for found, wanted in zip(ours, whole, strict=True):
        # Sums of at most 50 terms in another order.
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert not any_loss_sum(logits_of, hidden, labels, [weight], 16).requires_grad


def test_gradients_of_a_loss_in_chunks_are_scaled_where_they_are_made():
    """Unscaled, the gradients of this loss are below the smallest number of float16."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 8, generator=generator).half().requires_grad_()
    weight = torch.randn(11, 8, generator=generator).half().requires_grad_()
    labels, factor = torch.randint(0, 11, (6,), generator=generator), 2.0**12

    def logits_of(states):
        return 2.0**-30 * (states.float() @ weight.T.float())

    (factor * any_loss_sum(logits_of, hidden, labels, [weight], 16, factor)).backward()
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    F.cross_entropy(2.0**-30 * (exact[0] @ exact[1].T), labels, reduction="sum").mul(factor).backward()
    for one, other in zip((hidden, weight), exact, strict=True):
        # Half the distance between two of the smallest numbers of float16, and fp32 rounding beside it.
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=2.0**-10, atol=0.51 * 2.0**-24)
        assert one.grad.count_nonzero() > one.numel() / 2

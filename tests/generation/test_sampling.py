"""The choice of the next token."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torchround.generation.continuations import Sampling, choose_token, token_shares

VOCAB = 40


def logits(seed):
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3, top_k=5),
        Sampling(1.0, top_p=0.8),
        Sampling(0.9, top_p=0.6, top_k=7),
        Sampling(2.0, top_p=1e-6),
        Sampling(1.0, top_k=1000),
    ],
    ids=str,
)
def test_shares_are_those_of_transformers(sampling):
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    for seed in range(20):
        scores = logits(seed).double()[None]
        for warper in warpers:
            scores = warper(None, scores)
        shares = token_shares(logits(seed), sampling)
        torch.testing.assert_close(shares / shares.sum(), scores[0].softmax(dim=0), rtol=1e-9, atol=1e-12)


def test_tokens_are_drawn_as_often_as_their_shares_say():
    sampling = Sampling(1.0, top_k=4)
    draws = sampling.draws_for([1, 2], 0)
    found = torch.bincount(
        torch.tensor([choose_token(logits(0), sampling, draws) for _ in range(4000)]), minlength=VOCAB
    )
    shares = token_shares(logits(0), sampling)
    assert found[shares == 0].sum() == 0
    # Five standard deviations of a count of 4000 draws.
    assert ((found - 4000 * shares).abs() <= 5 * (4000 * shares * (1 - shares)).sqrt()).all()


def test_draws_depend_on_seed_prompt_and_occurrence_alone():
    def first(seed, prompt, occurrence):
        return torch.rand((), generator=Sampling(1.0, seed=seed).draws_for(prompt, occurrence)).item()

    assert first(0, [5, 6], 0) == first(0, [5, 6], 0)
    assert len({first(0, [5, 6], 0), first(1, [5, 6], 0), first(0, [6, 5], 0), first(0, [5, 6], 1)}) == 4


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "drawn"])
def test_logits_that_are_not_numbers_are_refused(sampling):
    bad = logits(0)
    bad[3] = torch.nan
    with pytest.raises(ValueError, match="not numbers"):
        choose_token(bad, sampling, sampling.draws_for([1], 0))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("seed", -1)],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} = "):
        Sampling(**{name: value})

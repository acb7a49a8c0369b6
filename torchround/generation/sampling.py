"""The choice of the next token from logits: the likeliest one, or one that is drawn.

A sequence draws from a generator of its own, which its prompt and the seed decide. So a continuation does not depend on
the other prompts, on their order, or on how they were grouped and where they ran, except for the rounding of logits.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    With `temperature` 0 it is the likeliest token, and nothing is drawn. Otherwise logits are divided by the
    temperature. Then only the `top_k` likeliest tokens stay (0 keeps all), and of those the likeliest ones that together
    have a probability of `top_p` or just more. `seed` decides all draws. Raises `ValueError` for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}; legal: 0 (the likeliest token) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p}; legal: above 0, up to 1 (all tokens)")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}; legal: 0 (all tokens) or more")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed}; legal: 0 to 2^63 - 1")

    def draws_for(self, prompt: Sequence[int], occurrence: int) -> torch.Generator | None:
        """Seed the generator of a sequence; None if nothing is drawn.

        `occurrence` counts the same prompt among the prompts before it, so that equal prompts get different texts.
        """
        if self.temperature == 0.0:
            return None
        content = np.array([self.seed, occurrence, *prompt], dtype="<i8").tobytes()
        return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(content) % 2**63)


def choose_token(logits: Tensor, sampling: Sampling, draws: torch.Generator | None) -> int:
    """Choose the next token for logits `[V]` on the host, by the sequence's `draws`. Raises `ValueError` for NaN."""
    if logits.isnan().any():
        raise ValueError("the model's logits are not numbers (NaN)")
    if draws is None:
        return int(logits.argmax())
    shares = token_shares(logits, sampling)
    # By token and not by likelihood: two nearly equal shares may change places with the rounding of logits.
    totals = shares.cumsum(dim=0)
    draw = torch.rand((), dtype=torch.float64, generator=draws) * totals[-1]
    # The first token whose total is above the draw, which rounding may put at the last total.
    return min(int(torch.searchsorted(totals, draw, right=True)), int(shares.nonzero()[-1]))


def token_shares(logits: Tensor, sampling: Sampling) -> Tensor:
    """Compute the probability of each token, `[V]` fp64, before they are scaled to add up to 1 again after `top_p`."""
    scores = logits.double()
    # The largest is 0 then, so that no temperature makes it infinite.
    scores = (scores - scores.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    shares = scores.softmax(dim=0)
    if sampling.top_p < 1.0:
        ordered, tokens = shares.sort(descending=True, stable=True)
        likelier = ordered.cumsum(dim=0) - ordered
        shares[tokens[likelier >= sampling.top_p]] = 0.0
    return shares

"""Continuations of prompts: forward passes through the engine, each of which gives every sequence its next token.

Sequences travel in groups, one micro-batch each, so that devices work at once. A group's sequences are padded on the
left. The first pass reads the prompts. In later passes each sequence brings its last token only, because the layers keep
keys and values of the tokens before it on their devices. If they cannot, each pass reads the whole text again.

Which sequences share a group depends on the prompts and on `batch_size` alone, never on the devices.

Shapes: B sequences of a group, T tokens, V vocabulary.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from torchround.engine.engine import Engine
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.planning.memory import size_text

logger = logging.getLogger(__name__)

# Micro-batches of a pass: enough for devices to work at once, and few, because each has a cost of its own.
GROUPS = 4
# Prompts are padded to multiples of this, so that passes of many lengths have few shapes, each with buffers of its own.
PADDED_TOKENS = 32
# Real tokens, and padding in front of them.
PADDED_DOCUMENTS = 2
# More sequences than anything has room for.
NO_LIMIT = 2**31


class DecodingCache:
    """Each layer's memory of a group's tokens so far, on the device that runs the layer.

    A layer makes its own by `new_cache(capacity)`; `capacity` counts the tokens of a sequence. Layers without that
    method see each token alone. A layer's thread uses its part alone, so the parts need no lock.
    """

    def __init__(self, layers: Sequence[nn.Module], capacity: int) -> None:
        remembering: Any = {index: layer for index, layer in enumerate(layers) if hasattr(layer, "new_cache")}
        self._of_layers = {index: layer.new_cache(capacity) for index, layer in remembering.items()}

    def for_layer(self, index: int) -> Any:
        return self._of_layers.get(index)

    def clear(self) -> None:
        """Drop the memory, whatever refers to this object."""
        for part in self._of_layers.values():
            part.clear()


def can_decode(layers: Sequence[nn.Module]) -> bool:
    """Check whether the inner layers remember earlier tokens. The first looks tokens up, the last takes one position."""
    return all(hasattr(layer, "new_cache") for layer in layers[1:-1])


def sequence_bytes(layers: Sequence[Any], tokens: int, element_bytes: int) -> list[int]:
    counted = (getattr(layer, "cache_bytes", lambda *_: 0) for layer in layers)
    return [int(count(1, tokens, element_bytes)) for count in counted]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    A sequence draws from a generator of its own, which its prompt and the seed decide. So a continuation does not depend on
    the other prompts, on their order, or on how they were grouped and where they ran, except for the rounding of logits.

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


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_tokens: Collection[int] = (),
    sampling: Sampling | None = None,
    batch_size: int = 16,
    cache_bytes: int | None = None,
) -> list[list[int]]:
    """Continue each prompt by up to `max_tokens` tokens, the stop token that ended it included.

    `batch_size` sequences are under way at a time. `cache_bytes` is the memory that each device has for keys and values:
    None is no limit, 0 reads the whole text again for each token. Fewer sequences are under way if it is too small for
    all of them. The model's last layer must give logits (`MicroBatch.wants`). Raises `ValueError` for an empty prompt, for
    one that is too long for the model, and for logits that are not numbers.
    """
    _check(engine, prompts, max_tokens)
    sampling = sampling or Sampling()
    seen: Counter[tuple[int, ...]] = Counter()
    sequences = []
    for prompt in prompts:
        key = tuple(prompt)
        draws = sampling.draws_for(key, seen[key])
        sequences.append(_Sequence(list(prompt), draws, sampling, max_tokens, frozenset(stop_tokens)))
        seen[key] += 1
    # Sequences of about a length share a group, so that little of it is padding.
    waiting = sorted(sequences, key=lambda sequence: len(sequence.tokens), reverse=True)
    warned = False
    while waiting and max_tokens > 0:
        rows, reason = _rows_that_fit(engine, _padded(len(waiting[0].tokens)) + max_tokens, cache_bytes)
        if reason and not warned:
            logger.warning("%s: each token reads the whole text again, which is slower", reason)
            warned = True
        count = min(rows or batch_size, batch_size)
        _continue(engine, waiting[:count], keeps=rows > 0)
        waiting = waiting[count:]
    return [sequence.continuation for sequence in sequences]


@dataclass
class _Sequence:
    tokens: list[int]
    draws: torch.Generator | None
    sampling: Sampling
    max_tokens: int
    stop_tokens: frozenset[int]
    continuation: list[int] = field(default_factory=list)
    ended: bool = False

    def add(self, logits: Tensor) -> None:
        token = choose_token(logits, self.sampling, self.draws)
        self.tokens.append(token)
        self.continuation.append(token)
        self.ended = token in self.stop_tokens or len(self.continuation) == self.max_tokens


class _Group:
    """Sequences that travel as one micro-batch. With `cache`, passes after the first one bring the last tokens only."""

    def __init__(self, sequences: Sequence[_Sequence], cache: DecodingCache | None) -> None:
        self.sequences = list(sequences)
        self.cache = cache
        self._is_begun = False

    @property
    def ended(self) -> bool:
        """Whether all sequences have ended. Until then those that have ended get tokens that nothing reads."""
        return all(sequence.ended for sequence in self.sequences)

    def micro_batch(self) -> MicroBatch:
        texts = [sequence.tokens for sequence in self.sequences]
        width = 1 if self._is_begun and self.cache is not None else _padded(max(map(len, texts)))
        self._is_begun = True
        tokens = torch.zeros(len(texts), width, dtype=torch.int64)
        # Padding is a document of its own in front, so that nothing sees it, and positions count from each document.
        positions = torch.arange(width).expand(len(texts), -1).clone()
        document_ids = torch.full_like(tokens, -1)
        for row, text in enumerate(texts):
            start = max(0, width - len(text))
            tokens[row, start:] = torch.tensor(text[start - width :])
            positions[row, start:] = torch.arange(len(text))[start - width :]
            document_ids[row, start:] = 0
        labels = torch.full_like(tokens, IGNORED_LABEL)
        facts: dict[str, Any] = {"max_documents": PADDED_DOCUMENTS, "wants": "logits", "cache": self.cache}
        return MicroBatch(tokens, labels, positions, document_ids, **facts)


def _continue(engine: Engine, sequences: Sequence[_Sequence], keeps: bool) -> None:
    """Continue sequences until all have ended. With `keeps`, keys and values stay on the devices meanwhile."""
    size = -(-len(sequences) // GROUPS)
    groups = []
    with ExitStack() as caches:
        for start in range(0, len(sequences), size):
            part, cache = sequences[start : start + size], None
            if keeps:
                capacity = _padded(max(len(sequence.tokens) for sequence in part)) + part[0].max_tokens
                cache = DecodingCache(engine.model.layers, capacity)
                caches.callback(cache.clear)
            groups.append(_Group(part, cache))
        while groups:
            logits = engine.forward([group.micro_batch() for group in groups]).outputs()
            for group, of_group in zip(groups, logits, strict=True):
                for sequence, row in zip(group.sequences, of_group, strict=True):
                    if not sequence.ended:
                        sequence.add(row)
                if group.ended and group.cache is not None:
                    group.cache.clear()
            groups = [group for group in groups if not group.ended]


def _rows_that_fit(engine: Engine, tokens: int, cache_bytes: int | None) -> tuple[int, str]:
    """Count how many sequences of `tokens` tokens have room for keys and values, and the reason if none has."""
    layers, stages, count = engine.model.layers, engine.forward_stages, len(engine.devices)
    if cache_bytes == 0:
        return 0, ""
    if not can_decode(layers):
        return 0, "this model's layers cannot keep keys and values"
    if len(stages) % count:
        return 0, f"layers change devices from pass to pass ({len(stages)} stages on {count} devices)"
    if cache_bytes is None:
        return NO_LIMIT, ""
    of_layers = sequence_bytes(layers, tokens, engine.store.dtype.itemsize)
    of_devices = [0] * count
    for index, stage in enumerate(stages):
        of_devices[index % count] += sum(of_layers[stage.start : stage.stop])
    rows = cache_bytes // max(*of_devices, 1)
    needed = f"{size_text(max(of_devices))} on a device, which has {size_text(cache_bytes)} for them"
    return rows, "" if rows else f"keys and values of one sequence of {tokens} tokens take {needed}"


def _padded(tokens: int) -> int:
    return -(-tokens // PADDED_TOKENS) * PADDED_TOKENS


def _check(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {index} has no tokens; a continuation needs at least one before it")
    limits = [getattr(layer, "longest", None) for layer in engine.model.layers]
    most = min((limit for limit in limits if limit is not None), default=NO_LIMIT)
    longest = max(map(len, prompts), default=0)
    # Padding in front of a text takes positions too, also in front of a grown one that is read again as a whole.
    if _padded(longest + max_tokens) > most:
        raise ValueError(
            f"a prompt of {longest} tokens and its continuation of up to {max_tokens} are too long: this model takes "
            f"sequences of {most} tokens, and texts are padded to multiples of {PADDED_TOKENS}"
        )


# The choice of the next token from logits.


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

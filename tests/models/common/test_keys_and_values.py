"""Keys and values that blocks keep: text that grows by one token a call has the logits of the whole text."""

from dataclasses import replace

import pytest
import torch

from torchround.generation.continuations import DecodingCache, can_decode, sequence_bytes
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.models import FAMILIES
from torchround.models.common.attention import KeysAndValues

LENGTHS = (19, 5, 1)  # of the prompts in a group; the longest is longer than GPT-OSS's window of 16
NEW_TOKENS = 3
CASES = [(name, flavor) for name in FAMILIES for flavor in ("debug", "debug_moe") if flavor in FAMILIES[name].flavors]


@pytest.fixture(params=CASES, ids="-".join)
def model(request, tools):
    family, flavor = FAMILIES[request.param[0]], request.param[1]
    built = tools.materialise(family.build(family.config_from_flavor(flavor, num_layers=2, vocab_size=50)))
    with torch.no_grad():
        for parameter in tools.stored_parameters(built).values():
            if parameter.ndim > 1:
                parameter *= 5  # attention far from uniform
            elif parameter.count_nonzero() == 0:
                parameter.normal_(generator=torch.Generator().manual_seed(3))  # biases and sinks
    return built


def padded(texts, width):
    """Return a group that is padded on the left: padding is a document of its own."""
    tokens = torch.full((len(texts), width), 7)
    positions = torch.arange(width).repeat(len(texts), 1)
    document_ids = torch.full_like(tokens, -1)
    for row, text in enumerate(texts):
        start = width - len(text)
        tokens[row, start:], positions[row, start:], document_ids[row, start:] = (text, torch.arange(len(text)), 0)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    return MicroBatch(tokens, labels, positions, document_ids, max_documents=2, wants="logits")


def logits(model, batch):
    hidden = None
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            hidden = layer(hidden, batch.for_layer(index))
    return hidden


def test_a_group_with_a_cache_has_the_logits_of_each_text_alone(model):
    draws = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 50, (length + NEW_TOKENS,), generator=draws) for length in LENGTHS]
    width = max(LENGTHS) + 2
    cache = DecodingCache(model.layers, width + NEW_TOKENS)
    batch = padded([text[:length] for text, length in zip(texts, LENGTHS, strict=True)], width)
    batch = replace(batch, cache=cache)
    for grown in range(NEW_TOKENS + 1):
        if grown:
            columns = [
                torch.tensor([[text[length + grown - 1]] for text, length in zip(texts, LENGTHS, strict=True)]),
                torch.full((len(texts), 1), IGNORED_LABEL),
                torch.tensor([[length + grown - 1] for length in LENGTHS]),
                torch.zeros(len(texts), 1, dtype=torch.int64),
            ]
            batch = MicroBatch(*columns, max_documents=2, wants="logits", cache=cache)
        found = logits(model, batch)
        assert found.dtype == torch.float32
        for row, (text, length) in enumerate(zip(texts, LENGTHS, strict=True)):
            expected = logits(model, padded([text[: length + grown]], length + grown))
            torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-4, atol=1e-4)


def test_the_memory_is_what_was_counted_and_goes_with_clear(model):
    cache = DecodingCache(model.layers, 9)

    def cached_bytes():
        parts = map(cache.for_layer, range(len(model.layers)))
        return sum(part.nbytes for part in parts if part is not None)

    assert can_decode(model.layers)
    assert cached_bytes() == 0
    logits(model, replace(padded([torch.arange(5), torch.arange(9)], 9), cache=cache))
    assert cached_bytes() == 2 * sum(sequence_bytes(model.layers, 9, 4)) > 0
    cache.clear()
    assert cached_bytes() == 0


def test_more_tokens_than_the_capacity_are_refused():
    kept = KeysAndValues(capacity=3)
    kept.append(*torch.zeros(2, 1, 3, 1, 4))
    with pytest.raises(AssertionError, match="4 tokens, and room for 3"):
        kept.append(*torch.zeros(2, 1, 1, 1, 4))

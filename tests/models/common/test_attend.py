"""Attention stays inside documents, whichever way it is computed."""

import pytest
import torch

from models.common import attend as attention
from models.common.attend import attend, attention_mask, known_single_documents

HEADS, KV_HEADS, CHANNELS = 6, 2, 5


def make_heads(batch, tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)


def ids(*rows):
    return torch.tensor([[index for index, length in enumerate(row) for _ in range(length)] for row in rows])


def brute_force(query, key, value, document_ids, window=None, sinks=None):
    """Query by query, over the tokens it may see."""
    mixed = torch.zeros_like(query)
    for row, token, head in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        earlier = torch.arange(token + 1)
        seen = earlier[document_ids[row, earlier] == document_ids[row, token]]
        if window is not None:
            seen = seen[seen > token - window]
        kv_head = head // (HEADS // KV_HEADS)
        scores = key[row, seen, kv_head] @ query[row, token, head] / CHANNELS**0.5
        if sinks is not None:
            scores = torch.cat((scores, sinks[head][None]))
        mixed[row, token, head] = scores.softmax(0)[: len(seen)] @ value[row, seen, kv_head]
    return mixed


@pytest.mark.parametrize("with_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 20])
@pytest.mark.parametrize(
    "document_ids",
    [ids([9], [9]), ids([4, 1, 4], [1, 8]), ids([9], [3, 6])],
    ids=["single", "packed", "mixed"],
)
def test_attention_and_its_gradients_equal_brute_force(document_ids, window, with_sinks):
    heads = make_heads(2, 9)
    inputs = [*heads, torch.linspace(-2, 3, HEADS).requires_grad_()] if with_sinks else [*heads]
    sinks = inputs[3] if with_sinks else None
    found = attend(*heads, document_ids, window, sinks)
    expected = brute_force(*heads, document_ids, window, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(found.shape)
    pairs = zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_returning_document_id_attends_to_its_earlier_part():
    # The protocol: two tokens are of one document exactly where their ids are equal.
    document_ids = torch.tensor([[0, 1, 1, 0, 0]])
    assert attention_mask(document_ids, None, torch.float32)[0, 0].exp().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


def test_with_and_without_a_mask_single_documents_give_the_same_gradients(monkeypatch):
    document_ids, upstream = ids([8], [8]), torch.randn(2, 8, HEADS, CHANNELS)
    assert known_single_documents(document_ids)
    plain = torch.autograd.grad(attend(*(heads := make_heads(2, 8)), document_ids), heads, upstream)
    monkeypatch.setattr(attention, "known_single_documents", lambda document_ids: False)
    masked = torch.autograd.grad(attend(*(heads := make_heads(2, 8)), document_ids), heads, upstream)
    for one, other in zip(plain, masked, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_is_asked_of_a_device_that_would_have_to_answer_first():
    # A meta tensor has no values: reading one raises, as reading from a busy device would wait.
    assert not known_single_documents(torch.zeros(2, 4, dtype=torch.int64, device="meta"))

"""Attention stays inside documents, whichever way it is computed."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import plain_flash
from tests.support.rounding import assert_close_in_sums
from torchround.layer import MicroBatch, longest_document, most_documents
from torchround.models.common import packed_attention
from torchround.models.common.attention import AttentionKernel, additive_mask, allowed_pairs, attend, choose_kernel
from torchround.models.common.packed_attention import document_offsets
from torchround.models.common.sinks import SinkAttention

HEADS, KV_HEADS, CHANNELS = 6, 2, 5
# Sums over the channels of a head and twice over at most 20 tokens; the backward has four of each.
FORWARD_TERMS = CHANNELS + 2 * 20
BACKWARD_TERMS = 5 * FORWARD_TERMS


def make_heads(batch, tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)


def ids(*rows):
    return torch.tensor([[index for index, length in enumerate(row) for _ in range(length)] for row in rows])


def documents(document_ids, most, longest=None):
    return MicroBatch(*[document_ids] * 4, max_documents=most, longest_document=longest)


def brute_force(query, key, value, document_ids, window=None, sinks=None):
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


def assert_gradients_close(found, expected):
    # A token that sees itself alone has no gradient for its query: its terms cancel, but not their roundings.
    scale = max(gradient.abs().max().item() for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        assert_close_in_sums(one, other, BACKWARD_TERMS, scale=scale)


SINGLE, PACKED, MIXED = ids([9], [9]), ids([4, 1, 4], [1, 8]), ids([9], [3, 6])
ROWS = [(SINGLE, None, False), (SINGLE, 4, True), (SINGLE, 9, False), (PACKED, None, True), (PACKED, 1, False)]
ROWS += [(PACKED, 4, True), (MIXED, None, False), (MIXED, 4, False), (MIXED, 1, True), (MIXED, 20, True)]


def check(function, document_ids, bound, window, with_sinks):
    heads = make_heads(2, 9)
    inputs = [*heads, torch.linspace(-2, 3, HEADS).requires_grad_()] if with_sinks else [*heads]
    sinks = inputs[3] if with_sinks else None
    found = function(*heads, documents(document_ids, bound), window, sinks)
    expected = brute_force(*heads, document_ids, window, sinks)
    assert_close_in_sums(found, expected, FORWARD_TERMS)
    upstream = torch.randn(found.shape)
    assert_gradients_close(*(torch.autograd.grad(mixed, inputs, upstream) for mixed in (found, expected)))


@pytest.mark.parametrize(("document_ids", "window", "with_sinks"), ROWS)
def test_attention_and_its_gradients_equal_brute_force(document_ids, window, with_sinks):
    check(attend, document_ids, most_documents(document_ids), window, with_sinks)


def test_a_returning_document_id_attends_to_its_earlier_part():
    # The protocol: two tokens are of one document exactly where their ids are equal.
    document_ids = torch.tensor([[0, 1, 1, 0, 0]])
    assert additive_mask(allowed_pairs(document_ids), torch.float32)[0, 0].exp().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "max_documents", "window", "sinks", "kernel"),
    [
        ("cpu", torch.float32, 128, 1, None, False, AttentionKernel.CAUSAL),
        ("cpu", torch.bfloat16, 128, 1, 64, False, AttentionKernel.CAUSAL),
        ("cpu", torch.bfloat16, 128, 1, 63, False, AttentionKernel.MASK),
        ("cpu", torch.bfloat16, 128, 4, None, False, AttentionKernel.MASK),
        ("cpu", torch.bfloat16, 128, None, None, False, AttentionKernel.MASK),
        ("cuda", torch.bfloat16, 128, 1, None, False, AttentionKernel.CAUSAL),
        ("cuda", torch.float32, 128, 1, 64, False, AttentionKernel.CAUSAL),
        ("cuda", torch.float16, 128, 1, 63, False, AttentionKernel.OFFSETS),
        ("cuda", torch.bfloat16, 128, 4, None, False, AttentionKernel.OFFSETS),
        ("cuda", torch.float32, 128, 4, None, False, AttentionKernel.MASK),
        ("cuda", torch.bfloat16, 128, None, None, False, AttentionKernel.MASK),
        # Heads that the flash kernel cannot take.
        *(("cuda", torch.bfloat16, size, 4, None, False, AttentionKernel.MASK) for size in (4, 36, 264)),
        # Sinks take the kernel that shares keys: the others repeat keys and values for each query head.
        ("cuda", torch.bfloat16, 64, 1, None, True, AttentionKernel.OFFSETS),
        ("cuda", torch.bfloat16, 64, 1, None, False, AttentionKernel.CAUSAL),
        ("cpu", torch.bfloat16, 64, 1, None, True, AttentionKernel.CAUSAL),
    ],
)
def test_no_mask_is_built_if_a_kernel_keeps_documents_apart_without_one(
    device, dtype, head_dim, max_documents, window, sinks, kernel
):
    assert choose_kernel(device, dtype, head_dim, 64, max_documents, window, sinks=sinks) is kernel


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=4), spare=st.integers(0, 3)
)
def test_offsets_are_the_beginnings_of_documents_however_many_fit(rows, spare):
    tokens = max(sum(row) for row in rows)
    rows = [[*row, tokens - sum(row)] if sum(row) < tokens else row for row in rows]
    room = max(map(len, rows)) + spare
    begins = list(accumulate((length for row in rows for length in row), initial=0))
    expected = begins + [begins[-1]] * (len(rows) * room + 1 - len(begins))
    found = document_offsets(ids(*rows), room)
    assert found.dtype == torch.int32 and found.tolist() == expected


@pytest.mark.parametrize(("window", "with_sinks"), [(None, True), (1, False), (4, True), (20, False)])
def test_attention_by_offsets_and_its_gradients_equal_brute_force(monkeypatch, window, with_sinks):
    """Replace the flash kernels by plain ones: the layout, offsets, windows and sinks around them are ours to test."""
    plain_flash.install(monkeypatch)
    check(packed_attention.attend_by_offsets, PACKED, 4, window, with_sinks)


def test_many_short_documents_cost_the_kernels_no_more_than_their_tokens(monkeypatch):
    """A kernel starts blocks for as many tokens as the longest document has, for each of them, and has scratch for each."""
    calls = []

    def backward_kernel(*arguments):
        calls.append((len(arguments[6]) - 1, arguments[7]))
        return plain_flash.plain_backward_kernel(*arguments)

    plain_flash.install(monkeypatch, backward_kernel)
    document_ids, heads = ids([6] * 42 + [4]), make_heads(1, 256)
    batch = documents(document_ids, most_documents(document_ids), longest_document(document_ids))
    mixed = packed_attention.attend_by_offsets(*heads, batch, None, None)
    found = torch.autograd.grad(mixed.sum(), heads)
    assert {longest for _, longest in calls} == {128}, "in blocks of the kernel"
    assert max(number for number, _ in calls) == 256 // 128
    monkeypatch.setattr(packed_attention, "documents_at_once", lambda tokens: tokens)
    mixed = packed_attention.attend_by_offsets(*heads, batch, None, None)
    for one, other in zip(found, torch.autograd.grad(mixed.sum(), heads), strict=True):
        assert torch.equal(one, other)


def test_offsets_and_masks_are_made_without_reading_from_the_device():
    # A meta tensor has no values: reading one raises, as reading from a busy device would wait.
    document_ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    assert document_offsets(document_ids, 4).shape == (9,)
    assert additive_mask(allowed_pairs(document_ids, 3), torch.bfloat16).shape == (2, 1, 4, 4)


def test_the_kernels_of_a_card_get_a_key_and_a_value_for_each_query_head():
    """Meta tensors take them, and have no values."""
    heads = [t.detach().to("meta").transpose(1, 2).requires_grad_() for t in make_heads(3, 9)]
    shapes = set()

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if "efficient_attention" in str(function):
                shapes.update(tensor.shape for tensor in arguments if getattr(tensor, "ndim", 0) == 4)
            return function(*arguments, **(options or {}))

    with Kernels():
        mixed = SinkAttention.apply(*heads, torch.empty(HEADS, device="meta"), None)
        gradients = torch.autograd.grad(mixed.sum(), heads)
    assert shapes == {mixed.shape}
    assert [gradient.shape for gradient in gradients] == [head.shape for head in heads]


def test_compiled_once_attention_by_offsets_serves_batches_of_any_number_of_documents(monkeypatch):
    plain_flash.install(monkeypatch)
    compiled = torch.compile(packed_attention.attend_by_offsets, backend="aot_eager", fullgraph=True, dynamic=False)
    sinks = torch.linspace(-2, 3, HEADS).requires_grad_()
    before = counters["stats"]["unique_graphs"]
    for rows in (([4, 1, 4], [1, 8]), ([2, 2, 2, 3], [9])):
        document_ids, heads = ids(*rows), make_heads(2, 9)
        bound = most_documents(document_ids)
        found = compiled(*heads, documents(document_ids, torch.tensor(bound), torch.tensor(9)), 4, sinks)
        expected = packed_attention.attend_by_offsets(*heads, documents(document_ids, bound), 4, sinks)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(mixed.sum(), [*heads, sinks]) for mixed in (found, expected)]
        for one, other in zip(*gradients, strict=True):
            assert_close_in_sums(one, other, BACKWARD_TERMS)
    assert counters["stats"]["unique_graphs"] - before == 1

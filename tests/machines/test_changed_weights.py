"""Changed weights: the receiver gets the new weights bit for bit, in fewer bytes if few changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.machines import changed_weights, links
from torchround.machines.changed_weights import decode, encode, receive_encoded, send_encoded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in ((changed_weights, "PIECE_NUMEL", 24), (links, "CHUNK_BYTES", 64)):
            patch.setattr(module, name, size)
        yield


def bits(weights):
    return weights.view(torch.int16 if weights.element_size() == 2 else torch.int32)


def pair(numel, dtype, share, seed):
    """Return old and new weights, random in all bits, so NaNs and infinities occur; new ones differ in this share."""
    generator = torch.Generator().manual_seed(seed)
    integer = bits(torch.empty(0, dtype=dtype)).dtype
    limits = torch.iinfo(integer)
    old, other = (torch.randint(limits.min, limits.max, (numel,), generator=generator, dtype=integer) for _ in range(2))
    new = torch.where(torch.rand(numel, generator=generator) < share, other, old)
    return old.view(dtype), new.view(dtype)


def encoded(old, new):
    return encode(old, new, torch.empty(new.nbytes, dtype=torch.uint8))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]), st.integers(0, 999))
def test_the_receiver_gets_the_new_weights_bit_for_bit_in_no_more_bytes_than_they_have(numel, dtype, share, seed):
    old, new = pair(numel, dtype, share, seed)
    coded = encoded(old, new)
    assert coded.payload.nbytes <= new.nbytes
    into = old.clone()
    decode(coded, into)
    assert torch.equal(bits(into), bits(new))
    memory = old.clone()  # they may also be encoded over the old ones
    over = encode(memory, new, memory.view(torch.uint8))
    assert torch.equal(over.payload, coded.payload) and torch.equal(over.lengths, coded.lengths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_sign_of_zero_counts_and_an_unchanged_nan_does_not(dtype):
    old = torch.tensor([0.0, float("nan"), 1.0, -0.0] * 6, dtype=dtype)
    new = old.clone()
    new[0] = -0.0
    coded = encoded(old, new)
    assert coded.payload.nbytes == 24 // 8 + new.element_size()
    into = old.clone()
    decode(coded, into)
    assert torch.equal(bits(into), bits(new))


def test_pieces_without_a_change_send_no_byte_and_changed_ones_their_bitmap_or_all():
    old = torch.zeros(72, dtype=torch.bfloat16)
    new = old.clone()
    new[24:26] = 1.0
    new[48:72] = 1.0
    assert encoded(old, new).lengths.tolist() == [0, 24 // 8 + 2 * 2, 24 * 2]


class Pipe:
    """Stands in for both ends of a link: messages in order, read in chunks whose memory is used again."""

    def __init__(self):
        self.messages = []

    def send(self, data, what):
        self.messages.append(data.clone())

    def receive(self, into, what):
        into.copy_(self.messages.pop(0))

    def chunks(self, numel, dtype, what):
        message = self.messages.pop(0)
        assert (message.numel(), message.dtype) == (numel, dtype)
        staging = torch.empty(links.CHUNK_BYTES, dtype=dtype)
        for start in range(0, numel, staging.numel()):
            values = message[start : start + staging.numel()]
            staging[: values.numel()] = values
            yield start, staging[: values.numel()]
            staging.fill_(99)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 400), st.sampled_from(DTYPES), st.sampled_from([0.0, 0.05, 0.4, 1.0]), st.integers(0, 999))
def test_pieces_that_cross_the_chunks_of_a_link_arrive_whole(numel, dtype, share, seed):
    old, new = pair(numel, dtype, share, seed)
    coded = encoded(old, new)
    pipe = Pipe()
    sent_bytes = send_encoded(pipe, coded, "weights")
    assert sent_bytes == sum(message.nbytes for message in pipe.messages)
    into = old.clone()
    receive_encoded(pipe, into, "weights")
    assert torch.equal(bits(into), bits(new))
    assert not pipe.messages

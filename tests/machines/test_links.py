"""Links between machines: what is sent arrives whole and in order, in bounded memory, and errors have a name."""

import random
from functools import partial

import pytest
import torch

from tests.support.machines import on_threads, run_machines
from torchround.machines import links as links_module
from torchround.machines.group import MachineError
from torchround.machines.links import Purpose

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(links_module, "CHUNK_BYTES", 64)


def between_two(send, receive):
    def work(group):
        if group.rank == 0:
            return send(group.link(1, Purpose.TRIAL), group)
        return receive(group.link(0, Purpose.TRIAL), group)

    return run_machines(2, work, connections=2, timeout_s=5.0)


def read_chunks(receiver, like):
    values = torch.empty_like(like)
    for start, chunk in receiver.chunks(like.numel(), like.dtype, "a message"):
        values[start : start + chunk.numel()] = chunk
    return values


def test_messages_of_any_size_and_dtype_arrive_whole_and_in_order():
    moment = random.Random(0)
    sizes = [0, 1, 16, 17, 64, 65, *(moment.randrange(700) for _ in range(60))]
    sent = [torch.randint(0, 200, (size,)).to(DTYPES[index % len(DTYPES)]) for index, size in enumerate(sizes)]
    by_chunks = [moment.random() < 0.5 for _ in sizes]

    def receive(receiver, group):
        received = [torch.empty_like(data) for data in sent]
        for index, into in enumerate(received):
            if by_chunks[index]:
                received[index] = read_chunks(receiver, into)
            else:
                receiver.receive(into, "a message")
        return received

    def send(sender, group):
        for data in sent:
            sender.send(data, "a message")
        return sender.bytes_sent

    sent_bytes, received = between_two(send, receive)
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))
    assert sent_bytes == sum(data.nbytes for data in sent)


def test_purposes_and_directions_do_not_mix():
    def work(group):
        other, received, calls = 1 - group.rank, {}, []
        for purpose in Purpose:
            sender, receiver = group.link(other, purpose), group.link(other, purpose)
            data = torch.full((500,), 10 * group.rank + purpose.value)
            received[purpose] = torch.empty(500, dtype=torch.int64)
            calls += [
                partial(sender.send, data, "a message"),
                partial(receiver.receive, received[purpose], "a message"),
            ]
        on_threads(calls)
        return all((received[purpose] == 10 * other + purpose.value).all() for purpose in Purpose)

    assert run_machines(2, work, connections=2) == [True, True]


def test_a_part_of_a_tensor_fills_a_part_of_another_and_no_byte_around_it():
    data = torch.arange(300, dtype=torch.int16)
    into = torch.full((300,), -1, dtype=torch.int16)
    between_two(
        lambda sender, group: sender.send(data[3:203], "a message"),
        lambda receiver, group: receiver.receive(into[50:250], "a message"),
    )
    assert torch.equal(into[50:250], data[3:203])
    assert (into[:50] == -1).all() and (into[250:] == -1).all()


def test_staging_holds_four_chunks_of_a_long_message():
    data = torch.arange(100 * links_module.CHUNK_BYTES, dtype=torch.uint8)
    _, places = between_two(
        lambda sender, group: sender.send(data, "a message"),
        lambda receiver, group: {v.data_ptr() for _, v in receiver.chunks(data.numel(), data.dtype, "a message")},
    )
    assert len(places) == links_module.STAGED_CHUNKS


def fails_to_send(data):
    def send(sender, group):
        with pytest.raises(MachineError, match=r"machine 1 \(node1\)"):
            sender.send(data, "a message")
            group.channel("steps").gather(0, "the end")

    return send


def test_a_message_of_another_size_than_expected_is_an_error_and_fills_nothing():
    into = torch.zeros(99)

    def receive(receiver, group):
        with pytest.raises(MachineError, match="message 0 of 400 bytes came instead of message 0 of 396.*part 3"):
            receiver.receive(into, "part 3")
        assert not into.any()
        group.fail("it ends")

    between_two(fails_to_send(torch.ones(100)), receive)


def test_a_reader_may_stop_after_the_last_chunk_without_asking_for_another():
    data = torch.arange(links_module.CHUNK_BYTES, dtype=torch.uint8)

    def receive(receiver, group):
        for _ in range(2):
            start, values = next(iter(receiver.chunks(data.numel(), data.dtype, "a message")))
            assert start == 0 and torch.equal(values, data)

    between_two(lambda sender, group: [sender.send(data, "a message") for _ in range(2)], receive)

"""Links between machines: what is sent arrives whole and in order, in bounded memory, and errors have a name."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchround.machines import links as links_module
from torchround.machines.links import PeerLinks, Purpose, RateLimit, Receiver

LONGEST_WAIT_S = 60.0


class NamedError(Exception):
    """What `explain` makes of gloo's errors here."""


class TwoMachines:
    """Two machines in this process with two connections between them."""

    def __init__(self) -> None:
        self.groups: list[list[dist.ProcessGroup]] = [[], []]
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        run_together([lambda: self._connect(0), lambda: self._connect(1)])
        self.links = [PeerLinks(rank, 2, self.groups[rank], explain) for rank in range(2)]

    def _connect(self, rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", self._store.port, is_master=False)
        for number in range(2):
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=LONGEST_WAIT_S)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self.groups[rank].append(dist.ProcessGroupGloo(dist.PrefixStore(f"{number}/", store), rank, 2, options))


def explain(error: Exception, peer: int | None, waited_for: str) -> Exception:
    return NamedError(f"{waited_for}, machine {peer}: {error}")


def run_together(calls: Sequence[Callable[[], object]]) -> None:
    """Run each call on a thread of its own. Raises the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_WAIT_S)
        assert not thread.is_alive(), "a machine hangs"
    if errors:
        raise errors[0]


@pytest.fixture(scope="module")
def machines() -> TwoMachines:
    return TwoMachines()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "CHUNK_BYTES", 64)


def read_chunks(receiver: Receiver, like: Tensor) -> Tensor:
    values = torch.empty_like(like)
    for start, chunk in receiver.chunks(like.numel(), like.dtype, "a message"):
        values[start : start + chunk.numel()] = chunk
    return values


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 700), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float16]),
    by_chunks=st.booleans(),
)
def test_messages_of_any_size_and_dtype_arrive_whole_and_in_order(
    machines: TwoMachines, sizes: list[int], dtype: torch.dtype, by_chunks: bool
) -> None:
    sent = [torch.randint(0, 200, (size,)).to(dtype) for size in sizes]
    received: list[Tensor] = []

    def send() -> None:
        for data in sent:
            machines.links[0].sender(1, Purpose.GRADIENTS).send(data, "a message")

    def receive() -> None:
        receiver = machines.links[1].receiver(0, Purpose.GRADIENTS)
        for data in sent:
            if by_chunks:
                received.append(read_chunks(receiver, data))
            else:
                into = torch.empty_like(data)
                receiver.receive(into, "a message")
                received.append(into)

    run_together([send, receive])
    assert all(torch.equal(one, other) for one, other in zip(received, sent, strict=True))


def test_purposes_and_directions_do_not_mix(machines: TwoMachines) -> None:
    routes = [(source, purpose) for source in range(2) for purpose in Purpose]
    data = {route: torch.full((500,), number) for number, route in enumerate(routes)}
    received = {route: torch.empty(500, dtype=torch.int64) for route in routes}
    calls: list[Callable[[], object]] = []
    for source, purpose in routes:
        route = (source, purpose)
        sender = machines.links[source].sender(1 - source, purpose)
        receiver = machines.links[1 - source].receiver(source, purpose)
        calls.append(lambda sender=sender, route=route: sender.send(data[route], "a message"))
        calls.append(lambda receiver=receiver, route=route: receiver.receive(received[route], "a message"))
    run_together(calls)
    assert all(torch.equal(received[route], data[route]) for route in routes)


def test_a_part_of_a_tensor_fills_a_part_of_another_and_no_byte_around_it(machines: TwoMachines) -> None:
    data = torch.arange(300, dtype=torch.int16)
    into = torch.full((300,), -1, dtype=torch.int16)
    run_together(
        [
            lambda: machines.links[0].sender(1, Purpose.FILES).send(data[3:203], "a message"),
            lambda: machines.links[1].receiver(0, Purpose.FILES).receive(into[50:250], "a message"),
        ]
    )
    assert torch.equal(into[50:250], data[3:203])
    assert (into[:50] == -1).all() and (into[250:] == -1).all()


def test_staging_holds_four_chunks_of_a_long_message(machines: TwoMachines) -> None:
    data = torch.arange(100 * links_module.CHUNK_BYTES, dtype=torch.uint8)
    seen: set[int] = set()

    def receive() -> None:
        for _, values in machines.links[1].receiver(0, Purpose.FILES).chunks(data.numel(), data.dtype, "a message"):
            seen.add(values.data_ptr())

    run_together([lambda: machines.links[0].sender(1, Purpose.FILES).send(data, "a message"), receive])
    assert len(seen) == links_module.STAGED_CHUNKS


def test_the_bytes_of_each_link_are_counted(machines: TwoMachines) -> None:
    sender = machines.links[1].sender(0, Purpose.WEIGHTS)
    receiver = machines.links[0].receiver(1, Purpose.WEIGHTS)
    before = sender.bytes_sent, receiver.bytes_received
    data = torch.ones(333, dtype=torch.bfloat16)
    run_together([lambda: sender.send(data, "a message"), lambda: read_chunks(receiver, data)])
    assert (sender.bytes_sent - before[0], receiver.bytes_received - before[1]) == (666, 666)


def test_a_message_of_another_size_than_expected_is_an_error_and_fills_nothing() -> None:
    machines = TwoMachines()
    into = torch.zeros(99)

    def receive() -> None:
        receiver = machines.links[1].receiver(0, Purpose.FILES)
        with pytest.raises(NamedError, match="part 3.*message 0 of 400 bytes came instead of message 0 of 396"):
            receiver.receive(into, "part 3")
        assert not into.any()
        with pytest.raises(NamedError, match="the reader of part 3 stopped before its end"):
            receiver.receive(into, "part 4")
        abort(machines, 1)

    run_together([lambda: fail_to_send(machines, torch.ones(100)), receive])


def test_a_reader_that_stops_early_does_not_hang_and_takes_no_rest_for_a_message() -> None:
    machines = TwoMachines()
    data = torch.ones(10 * links_module.CHUNK_BYTES, dtype=torch.uint8)

    def receive() -> None:
        receiver = machines.links[1].receiver(0, Purpose.FILES)
        with pytest.raises(ZeroDivisionError):
            for _ in receiver.chunks(data.numel(), data.dtype, "part 3"):
                1 / 0  # noqa: B018
        with pytest.raises(NamedError, match="the reader of part 3 stopped before its end"):
            read_chunks(receiver, data)
        abort(machines, 1)

    run_together([lambda: fail_to_send(machines, data), receive])


def test_a_reader_may_stop_after_the_last_chunk_without_asking_for_another(machines: TwoMachines) -> None:
    sender = machines.links[0].sender(1, Purpose.FILES)
    receiver = machines.links[1].receiver(0, Purpose.FILES)
    data = torch.arange(links_module.CHUNK_BYTES, dtype=torch.uint8)

    def receive() -> None:
        for _ in range(2):
            start, values = next(iter(receiver.chunks(data.numel(), data.dtype, "a message")))
            assert start == 0 and torch.equal(values, data)

    run_together([lambda: [sender.send(data, "a message") for _ in range(2)], receive])


def fail_to_send(machines: TwoMachines, data: Tensor) -> None:
    """Send from machine 0 to machine 1 until machine 1 closes its connections."""
    with pytest.raises(NamedError, match="sending a message"):
        machines.links[0].sender(1, Purpose.FILES).send(data, "a message")


def abort(machines: TwoMachines, rank: int) -> None:
    """Close all connections of one machine, as its group does after a fault."""
    for group in machines.groups[rank]:
        with pytest.raises(RuntimeError):
            group.recv([torch.zeros(1)], 1 - rank, 99).wait(timedelta(milliseconds=1))


def test_an_aborted_group_wakes_each_blocked_link_here_and_at_the_peer_with_a_named_error() -> None:
    machines = TwoMachines()
    data = torch.ones(1000)
    calls: dict[str, Callable[[], object]] = {
        "receiving here": lambda: machines.links[0].receiver(1, Purpose.GRADIENTS).receive(data, "here"),
        "sending here": lambda: machines.links[0].sender(1, Purpose.WEIGHTS).send(data, "here"),
        "receiving there": lambda: read_chunks(machines.links[1].receiver(0, Purpose.FILES), data),
        "sending there": lambda: machines.links[1].sender(0, Purpose.FILES).send(data, "there"),
    }
    raised: dict[str, NamedError] = {}
    started = threading.Barrier(len(calls) + 1)

    def run(name: str, call: Callable[[], object]) -> None:
        started.wait(LONGEST_WAIT_S)
        with pytest.raises(NamedError) as caught:
            call()
        raised[name] = caught.value

    def end() -> None:
        started.wait(LONGEST_WAIT_S)
        abort(machines, 0)

    run_together([*(lambda name=name, call=call: run(name, call) for name, call in calls.items()), end])
    assert "receiving here, machine 1" in str(raised["receiving here"])
    assert "sending here, machine 1" in str(raised["sending here"])
    assert "receiving a message, machine 0" in str(raised["receiving there"])
    assert "sending there, machine 0" in str(raised["sending there"])
    with pytest.raises(NamedError):
        machines.links[0].sender(1, Purpose.FILES).send(data, "later")


def test_a_rate_is_shared_by_all_that_take_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StillClock()
    monkeypatch.setattr(links_module, "time", clock)
    limit = RateLimit(100.0)
    for nbytes in (50, 100, 25):
        limit.take(nbytes)
    assert clock.slept_s == [0.5, 1.5, 1.75]


def test_a_chunk_that_a_sender_has_delayed_already_is_not_delayed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StillClock()
    monkeypatch.setattr(links_module, "time", clock)
    limit = RateLimit(100.0)
    clock.now_s = 10.0
    limit.take(100, wanted_since=0.0)
    limit.take(100, wanted_since=0.0)  # came at the same time from another machine, over the same card
    assert clock.slept_s == [0.0, 1.0]


def test_a_chunk_starts_no_earlier_than_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StillClock()
    monkeypatch.setattr(links_module, "time", clock)
    limit = RateLimit(100.0)
    clock.now_s = 10.0
    limit.take(100, wanted_since=9.75)
    assert clock.slept_s == [0.75]


class StillClock:
    """A clock that stands still and notes sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)

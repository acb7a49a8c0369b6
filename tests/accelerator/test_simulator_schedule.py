"""The scheduler runs nothing too early and serves every thread. `test_planted.py` shows that it finds missing waits."""

import threading

import pytest
import torch

DEVICE = "simulated:0"


def streams(count, simulator):
    made = [torch.Stream(device=DEVICE) for _ in range(count)]
    for stream, name in zip(made, "abcdefgh", strict=False):
        simulator.name_stream(stream, name)
    return made


def on(stream, work):
    with stream:
        return work()


def event_on(stream):
    event = torch.Event(device=DEVICE)
    event.record(stream)
    return event


def late_stream_and_tensor(simulator):
    """Make a stream that is late, and a tensor that is there already. No thread is served by the fallback."""
    (late,) = streams(1, simulator)
    x = torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    simulator.run_adversarially(0, {late: "late"})
    simulator.set_fallback_after(600)
    return late, x


def test_only_what_a_waiting_thread_needs_runs(simulator):
    a, b, c = streams(3, simulator)
    x, y, z = (torch.zeros(3, device=DEVICE) for _ in range(3))
    torch.accelerator.synchronize()
    simulator.run_adversarially(0, dict.fromkeys((a, b, c), "late"))
    simulator.keep_journal(20)
    on(a, lambda: x.add_(1))
    b.wait_event(event_on(a))
    on(a, lambda: x.add_(1))  # after the event: not needed
    on(b, lambda: y.add_(x))
    middle = event_on(b)
    on(b, lambda: y.add_(1))  # after the event: not needed
    on(c, lambda: z.add_(1))  # another stream: not needed
    middle.synchronize()
    ran = [line.removeprefix("simulated:0 ") for line in simulator.journal()]
    kernels = [(line.split()[0], line.split()[2]) for line in ran]
    assert sorted(kernels) == sorted(
        [("a", "aten::add.out"), ("a", "event"), ("b", "wait"), ("b", "aten::add.out"), ("b", "event")]
    )
    assert kernels[0] == ("a", "aten::add.out")


class HostThread:
    def __init__(self, simulator, work):
        self.simulator, self.work = simulator, work
        self.number, self.is_registered = 0, threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.is_registered.wait()

    def _run(self):
        self.number = self.simulator.register_thread()
        self.is_registered.set()
        self.work()
        self.simulator.unregister_thread(self.number)


def test_a_waiting_thread_is_served_only_when_all_registered_threads_wait(simulator):
    late, x = late_stream_and_tensor(simulator)
    on(late, lambda: x.add_(1))
    simulator.keep_journal(10)
    mine = simulator.register_thread()
    other = HostThread(simulator, late.synchronize)
    other.thread.join(0.3)
    assert other.thread.is_alive() and simulator.journal() == []  # this thread runs, as far as the simulator knows
    simulator.host_blocks(mine)
    other.thread.join()
    simulator.host_unblocks(mine)
    simulator.unregister_thread(mine)
    assert len(simulator.journal()) == 1 and simulator.fallbacks() == 0


def test_a_thread_that_the_simulator_does_not_know_to_wait_hangs_nothing(simulator):
    late, x = late_stream_and_tensor(simulator)
    simulator.set_fallback_after(0.05)
    on(late, lambda: x.add_(1))
    mine = simulator.register_thread()
    other = HostThread(simulator, late.synchronize)
    other.thread.join()  # unreported
    simulator.unregister_thread(mine)
    assert simulator.fallbacks() == 1


@pytest.mark.parametrize("mode", ["run_freely", "run_adversarially"])
def test_a_planted_fault_is_raised_by_each_wait_until_the_devices_are_reset(simulator, mode):
    (stream,) = streams(1, simulator)
    x = torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    getattr(simulator, mode)(0)
    simulator.inject_fault(0, 1)  # one more kernel runs
    with pytest.raises(RuntimeError, match="planted fault"):  # where it is seen first depends on the mode
        on(stream, lambda: x.add_(1).mul_(2))
        stream.synchronize()
    event = torch.Event(device=DEVICE)
    for wait in (stream.synchronize, lambda: event.record(stream), lambda: torch.zeros(1, device=DEVICE)):
        with pytest.raises(RuntimeError, match="simulated:0 failed: planted fault"):
            wait()
    simulator.reset()
    assert torch.ones(3, device=DEVICE).sum().item() == 3


def test_what_needs_its_data_is_synchronous_and_counted(simulator):
    x = torch.arange(5.0, device=DEVICE)
    assert simulator.synchronous_operations() == {}
    x.sum().item()
    assert x.nonzero().shape == (4, 1)
    counted = simulator.synchronous_operations()
    assert counted["aten::_local_scalar_dense"] == 1 and counted["aten::nonzero"] == 1

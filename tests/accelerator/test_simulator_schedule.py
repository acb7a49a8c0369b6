"""The scheduler runs nothing too early and, in its adversarial mode, finds a missing wait each time, by seed."""

import threading

import pytest
import torch

DEVICE = "simulated:0"
SEEDS = range(12)


def streams(count, simulator):
    """Make streams that the journal names by letters."""
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


def test_nothing_of_a_late_stream_runs_before_a_thread_waits_for_it(simulator):
    late, x = late_stream_and_tensor(simulator)
    simulator.keep_journal(10)
    on(late, lambda: x.add_(1))
    assert simulator.journal() == []
    late.synchronize()
    assert len(simulator.journal()) == 1


def test_a_task_of_an_early_stream_has_run_when_it_is_enqueued(simulator):
    early, late = streams(2, simulator)
    x, y = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    simulator.run_adversarially(0, {early: "early", late: "late"})
    simulator.keep_journal(10)
    on(early, lambda: x.add_(1))
    assert [line.split()[1] for line in simulator.journal()] == ["a"]
    on(late, lambda: y.add_(1))
    early.wait_event(event_on(late))
    on(early, lambda: x.mul_(2))
    assert [line.split()[1] for line in simulator.journal()] == ["a"], "the early stream waits for the late one"
    late.synchronize()
    assert [line.split()[1] for line in simulator.journal()][-2:] == ["a", "a"], "it ran on as soon as it could"


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


def race(simulator, seed, waits, roles=None):
    """Copy down what another stream computes. Returns whether the host got it."""
    compute, download = streams(2, simulator)
    x = torch.ones(64, device=DEVICE)
    host = torch.zeros(4096, dtype=torch.uint8)
    assert simulator.host_register(host.data_ptr(), host.nbytes) == 0
    target = host[:256].view(torch.float32)
    torch.accelerator.synchronize()
    simulator.run_adversarially(seed, {s: r for s, r in zip((compute, download), roles or (), strict=False)})
    on(compute, lambda: x.mul_(7))
    if waits:
        download.wait_event(event_on(compute))
    on(download, lambda: target.copy_(x, non_blocking=True))
    event_on(download).synchronize()
    right = bool((target == 7).all())
    torch.accelerator.synchronize()  # before `x` is freed: other streams use it
    assert simulator.host_unregister(host.data_ptr()) == 0
    return right


def test_a_missing_wait_is_found_each_time_if_the_waiting_stream_is_early(simulator):
    for seed in SEEDS:
        assert not race(simulator, seed, waits=False, roles=("late", "early"))
        assert race(simulator, seed, waits=True, roles=("late", "early"))


def test_seeds_that_draw_the_roles_find_a_missing_wait_and_repeat_it(simulator):
    outcomes = [race(simulator, seed, waits=False) for seed in SEEDS]
    assert not all(outcomes)
    assert outcomes == [race(simulator, seed, waits=False) for seed in SEEDS]
    assert all(race(simulator, seed, waits=True) for seed in SEEDS)


def drawn_roles(simulator, seed):
    """Enqueue a task on each of six streams. Returns which of the streams are early: those whose task has run."""
    made = streams(6, simulator)
    tensors = [torch.zeros(3, device=DEVICE) for _ in made]
    torch.accelerator.synchronize()
    simulator.run_adversarially(seed)
    simulator.keep_journal(10)
    for stream, x in zip(made, tensors, strict=True):
        on(stream, lambda x=x: x.add_(1))
    early = "".join(line.split()[1] for line in simulator.journal())
    torch.accelerator.synchronize()
    return early


def test_streams_without_a_role_draw_it_by_the_seed(simulator):
    roles = [drawn_roles(simulator, seed) for seed in SEEDS]
    assert len(set(roles)) > len(SEEDS) // 2
    assert roles == [drawn_roles(simulator, seed) for seed in SEEDS]


def tangle(simulator, seed):
    """Do work on four streams that wait for each other, from one thread. Returns the journal."""
    made = streams(4, simulator)
    x = torch.zeros(8, device=DEVICE)
    torch.accelerator.synchronize()
    simulator.run_adversarially(seed)
    simulator.keep_journal(10_000)
    for step in range(30):
        stream, other = made[step * 7 % 4], made[step * 3 % 4 - 1]
        on(stream, lambda step=step: torch.add(x, step))
        if step % 3 == 0:
            other.wait_event(event_on(stream))
        if step % 5 == 0:
            other.synchronize()
    torch.accelerator.synchronize()
    return simulator.journal()


def test_a_seed_repeats_the_order_of_all_tasks_and_another_seed_changes_it(simulator):
    journals = [tangle(simulator, seed) for seed in SEEDS]
    assert journals == [tangle(simulator, seed) for seed in SEEDS]
    assert len({tuple(journal) for journal in journals}) > len(SEEDS) // 2
    assert len({frozenset(journal) for journal in journals}) == 1, "the same tasks in another order"


class HostThread:
    """A registered host thread that runs `work` and then ends."""

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


def test_a_thread_that_is_woken_counts_as_running_at_once(simulator):
    """Its waker reports it. Otherwise another thread would be served before the woken one has enqueued."""
    late, x = late_stream_and_tensor(simulator)
    on(late, lambda: x.add_(1))
    simulator.keep_journal(10)
    end, mine = threading.Event(), simulator.register_thread()
    woken = HostThread(simulator, end.wait)
    simulator.host_blocks(woken.number)
    simulator.host_unblocks(woken.number)
    waiter = HostThread(simulator, late.synchronize)
    simulator.host_blocks(mine)
    waiter.thread.join(0.3)
    assert waiter.thread.is_alive() and simulator.journal() == []
    simulator.host_blocks(woken.number)
    waiter.thread.join()
    simulator.unregister_thread(mine)
    end.set()
    woken.thread.join()
    assert len(simulator.journal()) == 1 and simulator.fallbacks() == 0


def test_a_thread_can_wait_until_it_alone_runs_and_serves_none_of_the_others(simulator):
    late, x = late_stream_and_tensor(simulator)
    simulator.keep_journal(10)
    mine = simulator.register_thread()

    def work():
        on(late, lambda: x.add_(1))
        late.synchronize()

    other = HostThread(simulator, work)
    simulator.wait_for_other_threads()
    assert simulator.journal() == [] and not late.query(), "the other thread has enqueued, and waits"
    simulator.unregister_thread(mine)
    other.thread.join()
    assert len(simulator.journal()) == 1


def two_threads(simulator, seed):
    """Let one thread wait for stream a and then for c, another for b. Returns the order of the three streams."""
    a, b, c = streams(3, simulator)
    x, y, z = (torch.zeros(3, device=DEVICE) for _ in range(3))
    torch.accelerator.synchronize()
    simulator.run_adversarially(seed, dict.fromkeys((a, b, c), "late"))
    simulator.set_fallback_after(600)
    simulator.keep_journal(10)
    begin, mine = threading.Event(), simulator.register_thread()

    def twice():
        begin.wait()
        on(a, lambda: x.add_(1))
        a.synchronize()
        on(c, lambda: z.add_(1))
        c.synchronize()

    def once():
        begin.wait()
        on(b, lambda: y.add_(1))
        b.synchronize()

    threads = [HostThread(simulator, twice), HostThread(simulator, once)]
    begin.set()
    simulator.unregister_thread(mine)
    for one in threads:
        one.thread.join()
    assert simulator.fallbacks() == 0
    return "".join(line.split()[1] for line in simulator.journal())


def test_a_thread_that_was_served_runs_up_to_its_next_wait_before_another_is_served(simulator):
    orders = [two_threads(simulator, seed) for seed in SEEDS]
    assert set(orders) == {"acb", "abc", "bac"}
    assert orders == [two_threads(simulator, seed) for seed in SEEDS]


def test_a_thread_that_the_simulator_does_not_know_to_wait_hangs_nothing(simulator):
    late, x = late_stream_and_tensor(simulator)
    simulator.set_fallback_after(0.05)
    on(late, lambda: x.add_(1))
    mine = simulator.register_thread()
    other = HostThread(simulator, late.synchronize)
    other.thread.join()  # unreported
    simulator.unregister_thread(mine)
    assert simulator.fallbacks() == 1


def test_an_event_that_is_polled_happens(simulator):
    late, x = late_stream_and_tensor(simulator)
    on(late, lambda: x.add_(1))
    event = event_on(late)
    for _ in range(10_000):
        if event.query():
            break
        threading.Event().wait(0.001)
    assert event.query() and late.query()


def test_timed_events_give_the_time_between_them(simulator):
    first, second = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(3, device=DEVICE)
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) > 0 > second.elapsed_time(first)


def test_a_backward_runs_on_the_stream_of_its_forward(simulator):
    stream, _ = streams(2, simulator)
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    torch.accelerator.synchronize()
    simulator.keep_journal(100)
    with stream:
        (w * 2).sum().backward()
    torch.accelerator.synchronize()
    backward = [line for line in simulator.journal() if "mul" in line]
    assert len(backward) >= 2 and all(" a " in line for line in backward)
    assert torch.equal(w.grad.cpu(), torch.full((3,), 2.0))


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

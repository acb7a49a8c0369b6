"""Threads that share a buffer: each piece is done once, whatever the system refuses or a thread raises."""

import itertools
import threading
import time
from collections import defaultdict

import pytest

from torchround.compiled_loops import RangeThreads


def work_seen(threads, length, ends=True):
    seen, taking = defaultdict(list), threading.Lock()

    def work(following):
        while True:
            with taking:
                first = following.value
                following.value += 10
            if first >= length:
                return
            seen[first, min(first + 10, length)].append(threading.current_thread().name)

    threads.run(length, 10, work)
    if ends:
        threads.close()
    return seen


def done_once(seen, length):
    pieces = {(start, min(start + 10, length)) for start in range(0, length, 10)}
    return seen.keys() == pieces and all(len(by) == 1 for by in seen.values())


@pytest.mark.parametrize(("count", "length"), [(1, 1003), (7, 1003), (7, 35), (7, 7), (7, 0)])
def test_every_piece_is_done_once_by_any_number_of_threads(count, length):
    assert done_once(work_seen(RangeThreads(count), length), length)


@pytest.mark.parametrize("most", [0, 2])
def test_work_of_threads_that_the_system_refuses_is_done_once_by_the_others(monkeypatch, most):
    start, started = threading.Thread.start, itertools.count()

    def refuse(thread):
        if next(started) >= most:
            raise RuntimeError(f"can't start new thread after {most}")
        start(thread)

    threads = RangeThreads(4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        first = work_seen(threads, 1000, ends=False)
    # What a thread was refused for is not done later either.
    second = work_seen(threads, 1000)
    assert done_once(first, 1000) and done_once(second, 1000)


@pytest.mark.parametrize("in_caller", [False, True])
def test_a_failure_in_one_thread_reaches_the_caller_after_all_have_ended(in_caller):
    both, ended = threading.Barrier(2), []

    def work(_):
        both.wait()
        if (threading.current_thread() is threading.main_thread()) is in_caller:
            raise ArithmeticError("planted")
        time.sleep(0.05)  # without a wait for it, the caller is faster
        ended.append(True)

    threads = RangeThreads(2)
    with pytest.raises(ArithmeticError, match="planted"):
        threads.run(20, 10, work)
    assert ended == [True]
    threads.close()

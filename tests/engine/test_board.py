"""Queues hand over jobs in their order, all jobs of one call together."""

import threading

import pytest

from torchround.engine.board import Board, Queue, Values
from torchround.engine.errors import Stopped


def test_a_queue_hands_over_jobs_in_their_order_and_ends_with_the_board():
    board = Board()
    queue, taken = Queue(board, "a job"), []

    def take():
        with pytest.raises(Stopped):
            while True:
                taken.append(queue.take("its next job"))

    taker = threading.Thread(target=take, name="taker")
    taker.start()
    for start in range(0, 90, 3):
        queue.put(start, start + 1, start + 2)
        queue.put()
    while len(taken) < 90 or "taker" not in board.waiting():
        pass
    assert board.waiting() == {"taker": "waits for its next job"}
    board.stop()
    taker.join(60)
    assert taken == list(range(90))


def test_a_taker_sees_all_jobs_of_a_call_and_gets_them_after_a_stop_too():
    """The tasks of an update must not be parted by a stop, nor a device's jobs by a wait for the next one."""
    board = Board()
    queue = Queue(board, "a job")
    assert queue.peek() is None
    queue.put(1, 2)
    assert (queue.peek(), queue.peek(), queue.take()) == (1, 1, 1)
    board.stop()
    assert (queue.peek(), queue.take(), queue.peek()) == (2, 2, None)
    with pytest.raises(Stopped):
        queue.take()


def test_all_threads_that_ask_first_get_the_same_value():
    values, barrier = Values("value {0}"), threading.Barrier(4)
    found = [[] for _ in range(4)]

    def ask(own):
        for number in range(200):
            barrier.wait(60)
            own.append(values[number])

    threads = [threading.Thread(target=ask, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(own == found[0] for own in found) and str(found[0][7]) == "value 7"

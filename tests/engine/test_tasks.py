"""The rule of tasks: an access waits for those before it that it conflicts with."""

import itertools

from torchround.engine.board import Board
from torchround.engine.errors import FaultLocation
from torchround.engine.tasks import MOST_READERS, WEIGHTS, Buffer, Task, Worker


def test_a_write_waits_for_all_reads_before_it_however_many_and_remembers_few():
    buffer, steps = Buffer(WEIGHTS), itertools.count()

    def access(**uses):
        return Task("a task", next(steps), FaultLocation("a worker")).declare(**uses).accesses[0]

    first = access(writes=[buffer])
    reads = [access(reads=[buffer]) for _ in range(3 * MOST_READERS)]
    write = access(writes=[buffer])
    assert len(write.after) == MOST_READERS and all(len(read.after) <= 2 for read in reads)
    reached, left = set(), [write]
    while left:
        earlier = left.pop()
        left += [found for found in earlier.after if found not in reached]
        reached.update(earlier.after)
    assert reached == {first, *reads}


def test_a_save_that_waits_for_the_disk_holds_up_no_read():
    buffer = Buffer(WEIGHTS)
    saver = Worker("saver", "saver", Board(), lambda task, error: None, saves=True)

    def access(worker=None, **uses):
        return Task("a task", 0, FaultLocation("a worker"), worker=worker).declare(**uses).accesses[0]

    save = access(saver, reads=[buffer])
    reads = [access(reads=[buffer]) for _ in range(3 * MOST_READERS)]
    assert all(save not in read.after for read in reads) and save in access(writes=[buffer]).after

"""Threads on memory nodes: what a machine's folder says, how buffers are cut, and who works on which part."""

import itertools
import logging
import os
import threading
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy import WIDTH, ToyBlock, toy_model
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.store import host_memory
from torchround.engine.store.host_memory import HostAllocator
from torchround.engine.store.host_store import HostStore
from torchround.optim import make_optimizer
from torchround.optim.node_threads import NodeThreads, cut, memory_nodes

CORES = frozenset(os.sched_getaffinity(0))
FIRST, LAST = min(CORES), max(CORES)
NODES = [frozenset({FIRST}), frozenset({LAST})]  # on a machine with one core both are that one


def made_up_nodes(folder, lists):
    for number, cores in lists.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    return folder


def test_nodes_are_read_in_order_and_cut_to_the_usable_cores(tmp_path):
    folder = made_up_nodes(tmp_path, {10: f"{LAST}-{LAST + 3}", 2: f"5000,{FIRST}", 1: "", 3: "5000-5002"})
    assert memory_nodes(folder) == [{FIRST}, set(range(LAST, LAST + 4)) & CORES]
    assert memory_nodes(tmp_path / "missing") == []
    (folder / "node1" / "cpulist").write_text("all of them")
    assert memory_nodes(folder) == [], "a machine that does not say has no nodes"


@given(length=st.integers(0, 10_000), unit=st.integers(1, 300), parts=st.integers(1, 9))
def test_ranges_cover_everything_once_and_begin_at_units(length, unit, parts):
    ranges = cut(length, unit, parts)
    assert [index for each in ranges for index in range(each.start, each.stop)] == list(range(length))
    assert len(ranges) == parts and all(each.start % unit == 0 for each in ranges)


def work_seen(threads, length, ends=True):
    """Let the threads take pieces of 10, and return by which threads each was taken, and the cores of these."""
    seen = defaultdict(list)

    def work(part):
        while (piece := part.take(10)) is not None:
            seen[piece].append((threading.current_thread().name, frozenset(os.sched_getaffinity(0))))

    threads.run(length, 10, work)
    if ends:
        threads.close()
    return seen


def done_once(seen, length):
    pieces = {(start, min(start + 10, length)) for start in range(0, length, 10)}
    return seen.keys() == pieces and {len(by) for by in seen.values()} == {1}


@pytest.mark.parametrize(("count", "nodes"), [(1, []), (7, []), (3, [NODES[0]])])
def test_every_piece_is_done_once_by_any_number_of_threads_and_a_flat_machine_binds_none(count, nodes):
    seen = work_seen(NodeThreads(count, nodes), 1003)
    assert done_once(seen, 1003) and {cores for [(_, cores)] in seen.values()} == {CORES}


@pytest.mark.parametrize(("nodes", "most"), [([], 0), ([], 1), (NODES, 0), (NODES, 2)])
def test_work_of_threads_that_the_system_refuses_is_done_once_by_the_others(monkeypatch, caplog, nodes, most):
    start, started = threading.Thread.start, itertools.count()

    def refuse(thread):
        if next(started) >= most:
            raise RuntimeError(f"can't start new thread for {most} of {nodes}")
        start(thread)

    threads = NodeThreads(4, nodes)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        first = work_seen(threads, 1000, ends=False)
    assert len(caplog.records) == 1 and "refused" in caplog.text
    # What a thread was refused for is not done later either.
    second = work_seen(threads, 1000)
    assert done_once(first, 1000) and done_once(second, 1000)


def test_threads_that_cannot_be_bound_work_on_any_core(caplog):
    with caplog.at_level(logging.WARNING):
        seen = work_seen(NodeThreads(4, [frozenset({5000}), frozenset({5001})]), 1000)
    assert done_once(seen, 1000) and "MainThread" not in {name for [(name, _)] in seen.values()}
    [message] = {record.getMessage() for record in caplog.records}
    assert "cannot be bound" in message


def test_threads_of_a_node_are_bound_to_its_cores_and_work_on_its_range():
    seen = work_seen(NodeThreads(4, NODES), 1000)
    assert done_once(seen, 1000)
    assert all(cores == NODES[start // 500] for (start, _), [(_, cores)] in seen.items())


def test_a_failure_in_one_thread_reaches_the_caller_after_all_have_ended():
    def work(part):
        raise ArithmeticError("planted")

    threads = NodeThreads(3, NODES)
    with pytest.raises(ArithmeticError, match="planted"):
        threads.run(1000, 10, work)
    threads.close()


@pytest.fixture
def first_writers(monkeypatch):
    """Make up two nodes, and note the name of the thread that writes each range of new buffers, address and bytes."""
    written = []

    def note(address, _, size):
        written.append((threading.current_thread().name.partition("_")[0], address, size))

    monkeypatch.setattr(host_memory, "nodes_of_machine", lambda: NODES)
    monkeypatch.setattr(host_memory.ctypes, "memset", note)
    return written


@pytest.mark.parametrize("for_devices", [True, False])
def test_new_buffers_are_first_written_by_threads_of_the_node_that_owns_them(first_writers, for_devices):
    buffer = HostAllocator(pinned=False).allocate(1_000_000, for_devices)
    begin, half = buffer.data_ptr(), 1_000_000 // 2 // 4096 * 4096
    assert sorted(first_writers) == [
        ("torchround node 0", begin, half),
        ("torchround node 1", begin + half, 1_000_000 - half),
    ]


class WideBlock(ToyBlock):
    """A block whose matrices have two learning rates in Muon, and so segments of their own."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4096, device="meta")
        self.down = torch.nn.Linear(4096, WIDTH, bias=False, device="meta")
        self.square = torch.nn.Parameter(torch.empty(256, 256, device="meta"))


def test_the_node_that_updates_a_range_of_a_segment_has_first_written_it(first_writers):
    model = toy_model()
    model = replace(model, layers=(model.layers[0], WideBlock(), *model.layers[2:]))
    store = HostStore(model, torch.bfloat16, optimizer=make_optimizer(MuonTable()))
    store.allocate_gradients(rounds=2)
    bundle = store.bundles[1]
    large = [segment for segment in bundle.segments if segment.numel >= 2**16]
    assert len(large) == 2
    for flat in (bundle.device_weights[0], bundle.residual, bundle.gradient):
        assert flat is not None
        for segment in large:
            for node, part in enumerate(cut(segment.numel * flat.itemsize, 4096, 2)):
                begin = flat.data_ptr() + segment.start * flat.itemsize
                assert (f"torchround node {node}", begin + part.start, part.stop - part.start) in first_writers

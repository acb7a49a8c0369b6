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


def made_up_nodes(folder, lists):
    for number, cores in lists.items():
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    return folder


def test_nodes_are_read_in_order_and_cut_to_the_usable_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 12)))
    folder = made_up_nodes(tmp_path, {10: "9,11,13", 2: "0-3,8", 0: "4-6", 1: "", 3: "0-1,12-15"})
    assert memory_nodes(folder) == [{4, 5, 6}, {2, 3, 8}, {9, 11}]
    assert memory_nodes(tmp_path / "missing") == []
    (folder / "node1" / "cpulist").write_text("all of them")
    assert memory_nodes(folder) == [], "a machine that does not say has no nodes"


@given(length=st.integers(0, 10_000), unit=st.integers(1, 300), parts=st.integers(1, 9))
def test_ranges_cover_everything_once_and_begin_at_units(length, unit, parts):
    ranges = cut(length, unit, parts)
    assert [index for each in ranges for index in range(each.start, each.stop)] == list(range(length))
    assert len(ranges) == parts and all(each.start % unit == 0 for each in ranges)


def work_seen(threads, length, ends=True):
    """Let the threads take pieces of 10, and return by which threads each was taken."""
    seen = defaultdict(list)

    def work(part):
        while (piece := part.take(10)) is not None:
            seen[piece].append(threading.current_thread().name)

    threads.run(length, 10, work)
    if ends:
        threads.close()
    return seen


def done_once(seen, length):
    pieces = {(start, min(start + 10, length)) for start in range(0, length, 10)}
    return seen.keys() == pieces and {len(by) for by in seen.values()} == {1}


@pytest.mark.parametrize(("count", "nodes"), [(1, []), (7, []), (3, [frozenset({0, 1})])])
def test_every_piece_is_done_once_by_any_number_of_threads_and_a_flat_machine_binds_none(count, nodes, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("a thread was bound"))
    assert done_once(work_seen(NodeThreads(count, nodes), 1003), 1003)


@pytest.mark.parametrize(("nodes", "most"), [([], 0), ([], 1), ([{0}, {1}], 0), ([{0}, {1}], 2)])
def test_work_of_threads_that_the_system_refuses_is_done_once_by_the_others(monkeypatch, caplog, nodes, most):
    start, started = threading.Thread.start, itertools.count()

    def refuse(thread):
        if next(started) >= most:
            raise RuntimeError(f"can't start new thread for {most} of {nodes}")
        start(thread)

    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    threads = NodeThreads(4, nodes)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        first = work_seen(threads, 1000, ends=False)
    assert len(caplog.records) == 1 and "refused" in caplog.text
    # What a thread was refused for is not done later either.
    second = work_seen(threads, 1000)
    assert done_once(first, 1000) and done_once(second, 1000)


def test_threads_that_may_not_be_bound_work_on_any_core(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted in this test")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with caplog.at_level(logging.WARNING):
        seen = work_seen(NodeThreads(4, [frozenset({0, 1}), frozenset({2, 3})]), 1000)
    assert done_once(seen, 1000) and "MainThread" not in {name for (name,) in seen.values()}
    [message] = {record.getMessage() for record in caplog.records}
    assert "cannot be bound" in message


def test_threads_of_a_node_are_bound_to_its_cores_and_work_on_its_range(monkeypatch):
    bound = {}

    def note(process, cores):
        assert process == 0  # the calling thread
        bound[threading.current_thread().name] = cores

    monkeypatch.setattr(os, "sched_setaffinity", note)
    nodes = [frozenset({0, 1}), frozenset({2, 3})]
    seen = work_seen(NodeThreads(4, nodes), 1000)
    assert set(bound.values()) == set(nodes)
    assert done_once(seen, 1000)
    assert all(bound[name] == nodes[start // 500] for (start, _), (name,) in seen.items())


def test_a_failure_in_one_thread_reaches_the_caller_after_all_have_ended():
    def work(part):
        raise ArithmeticError("planted")

    threads = NodeThreads(3, [frozenset(os.sched_getaffinity(0))] * 2)
    with pytest.raises(ArithmeticError, match="planted"):
        threads.run(1000, 10, work)
    threads.close()


@pytest.fixture
def first_writers(monkeypatch):
    """Make up two nodes, and note which of them writes each range of new buffers: node (-1: neither), address, bytes."""
    nodes = (frozenset({0}), frozenset({1}))
    bound = {}
    written = []
    monkeypatch.setattr(host_memory, "nodes_of_machine", lambda: nodes)
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cores: bound.update({threading.get_ident(): nodes.index(cores)})
    )
    monkeypatch.setattr(
        host_memory.ctypes,
        "memset",
        lambda address, _, size: written.append((bound.get(threading.get_ident(), -1), address, size)),
    )
    return written


@pytest.mark.parametrize("for_devices", [True, False])
def test_new_buffers_are_first_written_by_threads_of_the_node_that_owns_them(first_writers, for_devices):
    buffer = HostAllocator(pinned=False).allocate(1_000_000, for_devices)
    begin, half = buffer.data_ptr(), 1_000_000 // 2 // 4096 * 4096
    assert sorted(first_writers) == [(0, begin, half), (1, begin + half, 1_000_000 - half)]


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
                assert (node, begin + part.start, part.stop - part.start) in first_writers

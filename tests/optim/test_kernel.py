"""The compiled update: the plain pass's bits for any length, cut and thread count; and a run without it.

A C++ compilation of about a second for each kind, kept in Inductor's cache folder like a user's own.
"""

import os
import threading
from dataclasses import replace

import pytest
import torch

from tests.support.kernel_kinds import BF16, KINDS, SPLIT, cut_out
from torchround.optim import UpdateProgress, update_
from torchround.optim.kernel import get_kernels
from torchround.optim.kernel_check import copy_of, example_buffers, have_same_bits, written_in_place
from torchround.optim.kernel_kind import KernelError
from torchround.optim.node_threads import NodeThreads

pytestmark = pytest.mark.compiles


def name_of(kind):
    names = [type(kind.rule).__name__, kind.format.name, str(kind.gradient), str(kind.written)]
    return "-".join([*names, *(["split"] if kind.splits else []), *(["predicts"] if kind.predicts else [])])


@pytest.fixture(scope="module")
def threads():
    found = NodeThreads(3)
    yield found
    found.close()


@pytest.fixture(scope="module")
def kernels(threads):
    found = get_kernels(KINDS, lambda: None, threads)
    assert found.keys() == set(KINDS)
    return found


def update(buffers, kernel, progress=None, predicts=False):
    update_(buffers, lr=3e-4, update=3, gradient_scale=0.7, progress=progress, kernel=kernel, predicts=predicts)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_kernel_gives_the_plain_passs_bits_for_every_short_length(kernels, kind):
    for numel in (*range(1, 35, 3), 127, 128, 129, 256, 257, 513):
        example = example_buffers(kind, numel, seed=numel)
        for plain in (example, written_in_place(example, kind.predicts)):
            compiled = copy_of(plain)
            update(plain, None, predicts=kind.predicts)
            update(compiled, kernels[kind], predicts=kind.predicts)
            assert have_same_bits(compiled, plain)


def test_its_bits_are_the_same_with_any_number_of_threads_on_any_nodes(kernels):
    usable = frozenset(os.sched_getaffinity(0))
    before = threading.active_count()
    for kind in SPLIT:
        plain = example_buffers(kind, 1_000_003)
        example = copy_of(plain)
        update(plain, None)
        for some in (NodeThreads(1), NodeThreads(2), NodeThreads(5), NodeThreads(3, [usable, usable])):
            compiled = copy_of(example)
            update(compiled, get_kernels([kind], lambda: None, some)[kind])
            some.close()
            assert have_same_bits(compiled, plain)
    assert threading.active_count() == before


def test_other_threads_run_python_during_an_update():
    """They see an update half done. With the interpreter's lock held they would see none, however often they look."""
    kind = SPLIT[1]
    one_thread = get_kernels([kind], lambda: None)[kind]
    buffers = example_buffers(kind, 2**23)
    written, seen_between = buffers.written, False
    for _ in range(200):
        written.fill_(7.0)  # which no update of these weights gives
        thread = threading.Thread(target=update, args=(buffers, one_thread))
        thread.start()
        while thread.is_alive() and not seen_between:
            seen_between = bool(written[0] != 7.0) and bool(written[-1] == 7.0)
        thread.join()
        if seen_between:
            break
    assert seen_between


@pytest.mark.parametrize("kind", SPLIT, ids=name_of)
def test_a_second_moment_that_overflows_stays_infinite_as_in_the_plain_pass(kernels, kind):
    """The next step is divided by its root: a zero would make that step huge."""
    plain = example_buffers(kind, 300)
    assert plain.gradient is not None
    plain.gradient[5], plain.gradient[140] = 1e25, -1e30
    compiled = copy_of(plain)
    for _ in range(3):
        update(plain, None)
        update(compiled, kernels[kind])
        assert have_same_bits(compiled, plain)
        assert plain.values(0, 300)[1][[5, 140]].isinf().all()


def test_an_update_under_way_is_finished_by_the_plain_pass(kernels):
    """A retry must leave elements alone that hold new values already; `progress` counts them."""
    for kind in SPLIT:
        finished = example_buffers(kind, 5000)
        buffers = copy_of(finished)
        update(finished, None)
        update(cut_out(buffers, 0, 2048), kernels[kind])
        update(buffers, kernels[kind], UpdateProgress(done=2048))
        assert have_same_bits(buffers, finished)


def test_a_kernel_that_refuses_its_arguments_has_touched_nothing(kernels):
    kind, progress = SPLIT[0], UpdateProgress()
    buffers = replace(example_buffers(kind, 500), gradient=torch.ones(1000, dtype=BF16)[::2])
    before = copy_of(buffers)
    with pytest.raises(KernelError, match="contiguous"):
        update(buffers, kernels[kind], progress)
    assert have_same_bits(buffers, before)
    assert progress.done == 0

"""Declared accesses of tasks: which there are in a run, whether each use of memory is declared, and runs without one of them."""

import threading
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch

from tests.support.faults import this_thread
from tests.support.race_checker import AccessLog, Region
from torchround.engine import program
from torchround.engine.reports import UpdateReport
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import DECISION, DIRECTION, GRADIENT, RECORDS, STATE, WEIGHTS, Buffer, Task
from torchround.engine.update import Decision

CONTROLLER = threading.local()  # its `log` is that of the engine that the thread controls
OF_NO_WORKER = ("torchround cpu", "MainThread", "node")  # threads that use memory for tasks without a worker


class DeclaredLog(AccessLog):
    """An access log that also asserts: each use of memory that is written again is declared by a task of that thread.

    `kinds` are the declared accesses: a task's name, a kind of memory, and what the task does with it. `undeclared` are
    uses without a declaration, by thread, memory and use. `failed` tells whether the run did.
    """

    def __init__(self):
        super().__init__()
        self.kinds, self.undeclared, self.failed = set(), set(), False
        self.decisions = []  # the memory that stands for each, in their order
        self.store = None
        self._open, self._knows_bundles = [], False
        self._buffers = defaultdict(list)  # by name, in the order of their versions
        self._contents = {}
        self._memory = defaultdict(list)  # by allocation: regions and their buffers

    def watch(self, store):
        CONTROLLER.log = self
        store.__class__, store.log, store.records = WatchedStore, self, torch.empty(1)
        self.store = store

    def made(self, buffer):
        self._buffers[buffer.name].append(buffer)
        self._contents[buffer] = content = torch.empty(1)
        self.note_memory([content], [buffer])

    def has_content(self, buffer, does):
        if buffer in self._contents:
            self.touched(**{"reads": (), "writes": (), does: [self._contents[buffer]]})

    def declares(self, accesses):
        """Note accesses. One that has ended allows nothing any more."""
        self.kinds |= set(map(kind_of, accesses))
        self._open = [*(earlier for earlier in self._open if not earlier.happened), *accesses]

    def access(self, actor, reads, writes):
        entry = super().access(actor, reads, writes)
        if self.store is not None and not self._knows_bundles:
            self._note_bundles()
        for regions, does in ((entry.reads, "reads"), (entry.writes, "writes")):
            for buffer in {found for region in regions for found in self._buffers_of(region)}:
                uses = (access for access in self._open if access.buffer is buffer and self._is_open_here(access))
                if not any(access.writes or does == "reads" for access in uses):
                    self.undeclared.add((this_thread(), buffer.name, does))
        return entry

    def _is_open_here(self, access):
        worker, thread = access.task.worker, threading.current_thread()
        if thread.name.startswith(OF_NO_WORKER):
            is_here = worker is None
        else:
            is_here = worker and worker.thread is thread and worker.task is access.task
        return is_here and access.is_ready and not access.happened

    def note_memory(self, tensors, buffers):
        """Note the memory of buffers, tensor by tensor. A shorter list of buffers begins anew."""
        for index, region in enumerate(map(Region.of, tensors)):
            self._memory[region.allocation].append((region, buffers[index % len(buffers)]))

    def _note_bundles(self):
        self._knows_bundles = True
        self.note_memory([self.store.records], self._buffers[RECORDS])
        for bundle in self.store.trained:
            layers = ", ".join(self.store.layer_names[layer] for layer in bundle.layers)
            memory = {
                WEIGHTS: bundle.device_weights,
                STATE: bundle.state(),
                GRADIENT: [bundle.gradient],
                DIRECTION: [segment.direction for segment in bundle.segments],
            }
            for kind, tensors in memory.items():
                present = [tensor for tensor in tensors if tensor is not None]
                self.note_memory(present, self._buffers[f"{kind} of {layers}"])

    def _buffers_of(self, region):
        yield from (buffer for known, buffer in self._memory.get(region.allocation, ()) if known.overlaps(region))
        for memory, buffer in zip(self.decisions, self._buffers[DECISION], strict=False):  # none in `bounded`
            if Region.of(memory).allocation == region.allocation:
                yield buffer


def kind_of(access):
    return access.task.name, access.buffer.kind, "writes" if access.writes else "reads"


class WatchedStore(HostStore):
    """A store whose `log` sees the engine's threads use the numbers that belong to a step."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name in {"step", "applied_updates", "prediction"} and this_thread().startswith("torchround"):
            self.log.touched((), [self.records])

    def resume_state(self):
        if this_thread().startswith("torchround"):
            self.log.touched([self.records], ())
        return super().resume_state()


class WatchedReport(UpdateReport):
    """The report of a watched decision, which is made once it says whether the update is skipped."""

    def __init__(self, decision):
        super().__init__()
        self.decision = decision

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "skipped" and hasattr(self, "decision"):
            self.decision.log.touched([], [self.decision.memory])


class WatchedDecision(Decision):
    """A decision that tells its log when the optimizer decides, and when another thread looks."""

    def __setattr__(self, name, value):
        if name == "step":
            self.log, self.memory = CONTROLLER.log, torch.empty(1)
            self.log.decisions.append(self.memory)
        elif name == "report":
            value = WatchedReport(self)
        super().__setattr__(name, value)

    def __getattribute__(self, name):
        if name == "applies" and this_thread() != "torchround optimizer":
            self.log.touched([self.memory], [])
        return super().__getattribute__(name)


@contextmanager
def declared(dropped=None):
    """An access of the `dropped` kind exists and ends, but waits for nothing, and nothing waits for it."""
    declare, make, content, logs = Task.declare, Buffer.__init__, Buffer.content, {}

    def making(buffer, kind, name="", content=None):
        make(buffer, kind, name, content)
        logs[buffer] = CONTROLLER.log
        logs[buffer].made(buffer)

    def reading(buffer):
        logs[buffer].has_content(buffer, "reads")
        return content.__get__(buffer)

    def writing(buffer, value):
        content.__set__(buffer, value)
        if buffer in logs:
            logs[buffer].has_content(buffer, "writes")

    def noting(task, reads=(), writes=()):
        for given, does in ((reads, "reads"), (writes, "writes")):
            for buffer in given:
                is_dropped = (task.name, buffer.kind, does) == dropped
                # Without that wait, machines would talk at cross purposes until their time is up.
                waits = not is_dropped or buffer.kind == DECISION
                declare(task, **{does: [buffer if waits else Buffer("nothing")]})
                task.accesses[-1].buffer = buffer
                logs[buffer].declares([] if is_dropped else task.accesses[-1:])
        return task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "declare", noting)
        patch.setattr(Buffer, "__init__", making)
        patch.setattr(Buffer, "content", property(reading, writing))
        patch.setattr(program, "Decision", WatchedDecision)
        yield

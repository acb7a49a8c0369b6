"""The controller: turns batches into stage jobs, hands them out in dispatch order, and returns their results.

    engine = Engine(model, store, devices, partition, optimizer=AdamWTable())
    result = engine.forward_backward(micro_batches)   # returns once dispatched
    engine.step(lr=3e-4)                              # likewise: the update runs beside the devices
    loss = result.loss()                              # waits

The engine stops at the first fault; the call in progress, and each later one, raises the `PipelineError`.
"""

import atexit
import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import torch

from torchround.config import OptimizerTable
from torchround.engine.board import Board, Flag, Observer, Queue, Value, Watchdog
from torchround.engine.buffer_reservation import BufferReservation, PassShape, ValueSizes
from torchround.engine.device import PASSED, Device
from torchround.engine.errors import MIXED, EngineError, EngineUsageError, PipelineError, Stopped
from torchround.engine.exchange import StepExchange
from torchround.engine.passes import UPDATED, DeviceJob, HostTensors, Pass, StepResult
from torchround.engine.program import Program
from torchround.engine.reports import UpdateReport
from torchround.engine.saver import Save
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import Bundle, Ownership
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Task, Worker
from torchround.engine.update import Updater
from torchround.engine.worker.device_worker import STAGE_JOB, DeviceWorker, WorkerSetup
from torchround.engine.worker.slots import Packing, fill
from torchround.layer import Batch, LayeredModel
from torchround.machines.group import MachineGroup
from torchround.optim import HostOptimizer
from torchround.optim.optimizer import make_optimizer
from torchround.planning.machine_shares import StepShare, step_share
from torchround.planning.memory import forward_stages
from torchround.planning.partition import Partition, Stage, StageTask, evaluation_tasks, step_tasks
from torchround.planning.update_modes import STEPS_UNDER_WAY

T = TypeVar("T")

# Time that ending allows for all threads together, and then for each bundle of an update under way. A thread
# inside a computation cannot be interrupted; it is a daemon and ends with the process.
JOIN_S = 30.0


class Engine:
    """A trainer of a layered model whose state is in a `HostStore`, on any number of devices.

    Raises `EngineUsageError` for calls in a wrong order, `PipelineError` for faults inside. Use it as a context manager.
    """

    def __init__(
        self,
        model: LayeredModel,
        store: HostStore,
        devices: Sequence[Device],
        partition: Partition,
        *,
        optimizer: OptimizerTable | HostOptimizer,
        settings: EngineSettings | None = None,
        observer: Observer | None = None,
        machines: MachineGroup | None = None,
    ) -> None:
        self.settings = settings = settings or EngineSettings()
        for problem in settings.problems(store, model, partition, optimizer):
            raise EngineUsageError(problem)
        if not isinstance(optimizer, HostOptimizer):
            store.assign_rules(model, make_optimizer(optimizer))
        self.model, self.store, self.partition = model, store, partition
        self.devices = list(devices)
        self._board = board = Board(observer)
        store.set_stale_layers(settings.stale_layers)
        # The sums are fp32, which PyTorch's optimizers need. The rounds decide which gradients need pool buffers.
        adds_up = settings.accumulates or (
            isinstance(optimizer, HostOptimizer) and store.dtype != torch.float32
        )
        store.allocate_gradients(settings.rounds, adds_up)
        store.observer = board.observer
        self.pool = HostPool(any(device.pins_host_memory for device in devices), board.observer)
        self._saves: list[Save[Any]] = []
        self._exchange = exchange = StepExchange(store, board, self.pool, machines)
        # Before anything is allocated on devices: it may refuse the optimizer.
        self._updater = Updater(store, board, self.pool, optimizer, settings, len(devices), exchange)
        saver = Worker("torchround saver", "saver", board, saves=True)
        self._queues = queues = [Queue[DeviceJob](board, STAGE_JOB) for _ in devices]
        self._program = Program(store, self._updater, saver, exchange, queues, settings.accumulates)
        kind, compiler = self.devices[0].torch_device.type, settings.compiler
        sizes = ValueSizes(model, settings.kept, store.dtype.itemsize, kind, compiler is not None)
        setup = WorkerSetup(store, board, self.pool, model, sizes, partition, queues, settings)
        self._reservation = BufferReservation(sizes, store, self.pool, len(devices), settings.accumulates)
        self._workers = [DeviceWorker(index, device, setup) for index, device in enumerate(self.devices)]
        self._step_workers = self._updater, *exchange.workers
        others = [worker.thread for worker in (saver, *self._step_workers)]
        others += [worker.reader.thread for worker in self._workers if worker.reader is not None]
        self._threads = [*(worker.thread for worker in self._workers), *others]
        self._watchdog = Watchdog(board, self._workers, others, settings.hang_timeout_s)
        self._under_way: deque[StepResult] = deque()  # the results of the newest passes
        self._numbers = itertools.count()  # of passes
        self._updated = Value[UpdateReport](UPDATED, store.step)  # of the newest step
        self._is_stopped = False
        self._stop_lock = threading.Lock()
        try:
            for worker in self._workers:
                worker.allocate()
        except BaseException:
            self._stop()  # gives back what was allocated on the devices that had room
            raise
        choose_kernels()
        board.on_fault = exchange.fail
        if machines is not None:
            machines.on_fault(exchange.failed)
        atexit.register(self._stop_at_exit, os.getpid())
        for thread in self._threads:
            thread.start()

    def forward_backward(
        self, micro_batches: Sequence[Batch], share: StepShare | None = None, num_labels: int | None = None
    ) -> StepResult:
        """Dispatch one training step: loss and gradients of all micro-batches.

        The loss is divided by `num_labels`, by default the number of non-ignored labels of the whole step. At most two passes
        are under way at a time. `step` must follow before the next one, unless the engine `accumulates`: then each call until
        `step` adds its gradient to that of the step. On several machines, all call this with their own `share` of the step
        (`step_share`), the micro-batches that it names, which may be none, and `num_labels` of the whole step.
        """
        with self._call():
            if self._program.open_pass and not self.settings.accumulates:
                raise EngineUsageError("forward_backward() was called twice without step() between")
            self._make_room()
            if share is None and self._exchange.peers:
                raise EngineUsageError(
                    "on several machines an engine needs the share of each step (`step_share`)"
                )
            if share is not None and len(share.micro_batches) != len(micro_batches):
                asked = f"a share of {len(share.micro_batches)} micro-batches came with {len(micro_batches)}"
                raise EngineUsageError(asked)
            # An empty batch has a share too, so that the engine can refuse it by its own message.
            share = share or step_share(max(len(micro_batches), 1), self.settings.rounds, 0, 1)
            if (machine := Ownership(share.machine, share.num_machines)) != self.store.ownership:
                raise EngineUsageError(f"the share is of {machine}, the store of {self.store.ownership}")
            share = share.after(self._program.rounds)
            num_devices, slot = len(self.devices), self._program.next_slot
            tasks: list[StageTask] = []
            if share.rounds:  # otherwise this machine has no part in the step
                num_batches, num_rounds = len(share.micro_batches), len(share.rounds)
                tasks = step_tasks(self.partition, num_batches, num_rounds, num_devices, slot)
                tasks = self._program.make_way(tasks)
            return self._dispatch(micro_batches, tasks, share=share, num_labels=num_labels)

    def step(self, lr: float | None = None) -> None:
        """Hand the update with the gradients of `forward_backward` to the optimizer worker. Does not wait.

        A `HostOptimizer` steps with its groups' hyperparameters as they are now, with an `lr` in place of their own.
        """
        with self._call():
            if not self._program.open_pass:
                raise EngineUsageError("step() needs a forward_backward() before it")
            lr, hyperparameters = self._updater.hyperparameters_of(lr)
            self._program.step(lr, hyperparameters)
            self._program.hand_out()

    def evaluate(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Dispatch a forward-only pass with the device weights as they are (`true_device_weights`). Does not wait."""
        return self._run_forward(micro_batches, gives_outputs=False)

    @cached_property
    def forward_stages(self) -> tuple[Stage, ...]:
        """The stages of `forward`: each layer meets the same device in every pass, if there are enough layers."""
        return forward_stages(self.partition, len(self.devices), self.store.stage_bytes)

    def forward(self, batches: Sequence[Batch]) -> StepResult:
        """Dispatch a pass as `evaluate` whose last layer may return any value: `StepResult.outputs`."""
        return self._run_forward(batches, gives_outputs=True)

    def _run_forward(self, batches: Sequence[Batch], gives_outputs: bool) -> StepResult:
        with self._call():
            if not self.settings.accumulates:
                self._require_no_open_step("forward" if gives_outputs else "evaluate")
            self._make_room()
            self._program.hand_out(with_deferred=True)
            stages = self.forward_stages if gives_outputs else None
            num_devices, slot = len(self.devices), self._program.next_slot
            tasks = evaluation_tasks(self.partition, max(len(batches), 1), num_devices, slot, stages)
            return self._dispatch(batches, tasks, gives_outputs=gives_outputs)

    def save(self, write: Callable[[Save[T]], T]) -> Save[T]:
        """Save the store as it is after the last dispatched step: calls `write` on the saver's thread. Does not wait.

        A bundle's next update waits until `write` reports that it has read the bundle. Saves are made one after the other.
        If `write` waits for `Save.may_publish`, the caller must call that before the engine ends.
        """
        with self._call():
            self._require_no_open_step("save")
            self._program.hand_out(with_deferred=True)
            save = Save(self.store, self._board, write, self._wait_for)
            save.task = self._program.save(save.run)
            self._program.hand_out()
            # A long run must not keep every save that ended.
            self._saves = [save for save in self._saves if not save.ended] + [save]
            return save

    def drain(self) -> None:
        """Wait until every dispatched step is done and its update is in the host store."""
        with self._call():
            self._program.hand_out_sums()  # of a call without its `step`: other machines may wait to send parts
            self._program.hand_out(with_deferred=True)
            for result in self._under_way:
                result.wait()
            for worker in self._step_workers:
                if worker.last is not None:
                    self._watchdog.wait_for(worker.last)

    @contextmanager
    def true_device_weights(self) -> Iterator[None]:
        """Let evaluations, the only calls allowed in the block, read the fp32 weights. Waits for all steps.

        Afterwards the device weights are as before, bit for bit: predictions, or older ones of stale layers.
        """
        self.drain()
        self._require_no_open_step("true_device_weights")
        task, is_whole = self._begin_rewrite(), False
        kept: list[tuple[Bundle, torch.Tensor]] = []
        try:
            try:
                self.store.write_true_weights(kept)
            finally:
                task.finish(self._board)
            self._share_rewritten()
            yield
            is_whole = True
        finally:
            try:
                task = self._begin_rewrite()  # evaluations may still read, also after an exception
            finally:
                self.store.restore_device_weights(kept)  # a fault has ended all readers
            task.finish(self._board)
            if is_whole:  # otherwise the other machines may never come to the end of the block
                self._share_rewritten()

    def _begin_rewrite(self) -> Task:
        with self._call():
            task = self._program.rewrite()
            for access in task.accesses:
                access.begin(self._watchdog)
            return task

    def _share_rewritten(self) -> None:
        with self._call():
            self._program.share_rewritten()
            self._program.hand_out()

    def close(self) -> None:
        """Finish dispatched steps and saves under way, unless a fault stopped the engine, and end every thread."""
        if self._is_stopped:
            return
        try:
            self.drain()
            for save in self._saves:
                save.may_publish()  # otherwise a save that waits for this would never end
                save.wait()
        finally:
            self._stop()
        self._raise_failure()

    def __enter__(self) -> "Engine":  # noqa: PYI034  (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        # After a stop no gradient comes, so an update layer by layer would end between two versions.
        if self.store.mode.updates_by_layer and issubclass(kind, Exception):
            with suppress(EngineError):  # the caller gets its own exception
                self.drain()
        self._stop()

    def _require_no_open_step(self, call: str) -> None:
        if self._program.open_pass:
            raise EngineUsageError(f"{call}() was called between forward_backward() and step()")

    # Passes.

    def _make_room(self) -> None:
        """Wait for the pass before the last. The next pass belongs to the next step, whose update cannot be waited for yet."""
        # The next step is dispatched while one runs; more would only hold more boundary activations.
        while len(self._under_way) >= STEPS_UNDER_WAY:
            result = self._under_way.popleft()
            # Only the last pass of a step waits for its update. Otherwise the next step could not begin beside it.
            is_last = result.step < min(self._program.next_step, self._under_way[0].step)
            result.wait()
            if is_last:
                result.update()  # even if that pass is an evaluation
            elif result.end is not None:
                self._wait_for(result.end)

    def _dispatch(
        self,
        batches: Sequence[Batch],
        tasks: list[StageTask],
        *,
        share: StepShare | None = None,
        num_labels: int | None = None,
        gives_outputs: bool = False,
    ) -> StepResult:
        """Hand out the next pass, with all that it needs reserved and in the pool. Only a training pass has a `share`."""
        step = self._program.next_step
        if tasks:  # otherwise this machine has no part in the step
            for index, batch in enumerate(batches):
                if problem := batch.problem():
                    raise EngineUsageError(f"micro-batch {index}: {problem}")
            if not batches:
                raise EngineUsageError("a pass needs at least one micro-batch")
        if num_labels is None:
            num_labels = 0 if gives_outputs else sum(batch.num_labels() for batch in batches)
        packings = [Packing.of(batch.tensors()) for batch in batches]
        first_stages = [task for task in tasks if task.stage_index == 0]
        shape = PassShape(
            stages=tuple(task.stage for task in tasks if task.round == 0),
            rounds=tuple(tuple(batches[m].shape for m in task.micro_batches) for task in first_stages),
            # From the first backward of a step on no layer is stale.
            stale_layers=0 if self._program.open_pass else self.store.stale_layers,
            training=share is not None,
            integer_bytes=tuple(packing.nbytes for packing in packings),
            step=step,
            gives_outputs=gives_outputs,
        )
        before = self._under_way[-1].shape if self._under_way else None
        if tasks and self._reservation.reserve_for(shape, before):
            # Each device allocates now what such passes need, so that later steps allocate nothing.
            for queue in self._queues:
                queue.put(shape)
        if self._updated.numbers != (step,):
            self._updated = Value(UPDATED, step)
        # Each device uploads the micro-batches that it works on; the last one gives their host buffers back.
        devices: list[set[int]] = [set() for _ in batches]
        for task in tasks:
            for m in task.micro_batches:
                devices[m].add(task.device)
        on_host = []
        for batch, packing, readers in zip(batches, packings, devices, strict=True):
            buffer = self.pool.take(packing.nbytes)
            for event in buffer.busy:
                self._watchdog.synchronize(event, "what reads a host buffer that a micro-batch needs")
            self._board.observer.touched(reads=(), writes=[buffer.memory])
            fill(packing.views(buffer.memory), batch.tensors())
            on_host.append(HostTensors(buffer, packing, PASSED, len(readers), batch.rebuild()))
        pass_ = Pass(next(self._numbers), shape, self.store, num_labels, on_host, share, self._updated)
        end = self._program.add(pass_, tasks)
        self._program.hand_out()
        self._under_way.append(StepResult(pass_, tasks, self.pool, self._wait_for, end))
        return self._under_way[-1]

    def _wait_for(self, flag: Flag, words: object = None) -> None:
        """Wait for a flag, and until a loss or output has landed. What has happened can be had even after a fault."""
        with self._call(is_known=flag.happened):
            if not flag.happened:
                updated = flag.numbers[0] if isinstance(flag, Value) and flag.kind == UPDATED else -1
                if updated >= self._program.next_step:
                    raise EngineUsageError("update() needs the step() that makes it")
                self._program.hand_out_sums()
                self._program.hand_out(with_deferred=self._program.defers(updated))
            self._watchdog.wait_for(flag, words)
            if isinstance(flag, Value) and isinstance(flag.content, HostTensors):
                self._watchdog.synchronize(flag.content.landed, words or flag)

    # Faults, and the end.

    @contextmanager
    def _call(self, is_known: bool = False) -> Iterator[None]:
        """Run a call of the user. Raises the engine's failure, unless the answer `is_known` already."""
        if not is_known:
            self._raise_failure()
            if self._is_stopped:
                raise EngineUsageError("the engine is closed")
        try:
            yield
        except Stopped:
            self._raise_failure()
            raise EngineUsageError("the engine was closed during this call") from None
        # The call has its answer, but a fault came meanwhile, such as one that the update's second try overcame.
        if not is_known:
            self._raise_failure()

    def _raise_failure(self) -> None:
        # Without a variable for it, which would make a reference cycle through the traceback.
        if self._board.failure is not None:
            self._stop()
            raise self._board.failure from self._board.failure.__cause__

    def _stop(self) -> None:
        """End every thread and give devices and pool back. A thread that still runs at a deadline keeps its memory."""
        with self._stop_lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        atexit.unregister(self._stop_at_exit)
        self._board.stop()  # every thread unwinds at its next wait
        # Other machines wait only in the middle of a step.
        if self._program.open_pass is not None or not all(worker.is_idle for worker in self._step_workers):
            self._exchange.stop(self._board.failure)
        busy = self._end_threads()
        failure = self._board.failure
        # In `bounded`, or if an update is stuck.
        if failure is not None and failure.store_is_consistent and not self.store.is_consistent:
            failure.store_is_consistent = False
            failure.add(f"some layers are updated: {MIXED}")
        if busy:  # memory that a device may still copy to must not be unmapped
            self.store.is_in_use = True
            if failure is not None:
                failure.add(f"still inside a computation, with its memory: {', '.join(sorted(busy))}")
            return
        # Losses and outputs leave the engine's pool, which is about to close. They may be missing after a fault.
        for result in self._under_way:
            with suppress(EngineUsageError, PipelineError, Stopped):
                result.wait()
        # A step that never got its `step()` may have written some stale layers. With a fault, more may be mixed.
        self.store.observer = Observer()
        is_open = self._program.open_pass is not None and self.store.step == self._program.next_step
        if is_open and self._board.failure is None:
            self.store.set_stale_layers(0)
            self.store.is_consistent = True
        self.pool.close()
        # The caller keeps the fault, and its traceback keeps the activations of the stage that failed.
        forget_variables(failure)

    def _stop_at_exit(self, process: int) -> None:
        """End an engine that the program did not close: Python would end its threads inside C++, which aborts."""
        if os.getpid() == process:  # a forked process has no such threads
            self._stop()

    def _end_threads(self) -> set[str]:
        """End all threads after the board's stop; each gives its device back. Returns the names of those that are still busy."""
        optimizer, moves = self._updater.thread, self._updater.moves
        deadline_s = time.monotonic() + JOIN_S
        # A thread without an identity has not been started, because a device had no room.
        ours = [thread for thread in self._threads if thread.ident not in (None, threading.get_ident())]
        for thread in ours:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        # As long as an update moves, because only a complete one leaves a store that can be saved.
        while optimizer.is_alive() and self._updater.moves != moves:
            moves = self._updater.moves
            optimizer.join(JOIN_S)
        for worker in self._workers:
            if worker.thread.ident is None:
                worker.release()
        return {thread.name for thread in ours if thread.is_alive()}


def forget_variables(error: BaseException | None) -> None:
    """Clear the local variables of all frames that an error and its causes have left. Lines and names stay."""
    left, seen = [error], set[int]()
    while left:
        if (error := left.pop()) is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)  # passes over frames that are still running
            left += [error.__cause__, error.__context__]


def choose_kernels() -> None:
    """Let MKL choose its kernels for this processor, which it does at a function's first call, on one thread.

    Two threads at their first call may get kernels that round in different ways, as in 5 of 2400 fresh processes.
    """
    number = torch.ones(1)
    for function in (torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf, torch.sin, torch.cos):
        function(number)

"""The program of a run: which tasks a step, an evaluation, a save or a rewrite has, in which order, and their memory.

This file says who writes what and when. The tasks' work is in `update.py`, `saver.py`, `exchange/` and `worker/`; how they
wait for each other follows from the order of the calls here alone (`tasks.py`).

The policies are places in this order. `sync` and `async` differ in the number of buffers that hold device weights. In
`bounded` the device weights of the stale layers are written between the first forward and the first backward of the next
step, and each bundle's update has its own gradient, not the norm. Several calls of a step emit their stages before the
update. What one machine writes and the others read is sent and received at its place in this order. An optimizer with
directions has a task of the devices between gradients and update; in `async` it comes between the forward and the
backward of the next step, and the rest of the step's program with it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torchround.engine.direction_jobs import DirectionJob, directed_bundles
from torchround.engine.errors import FaultLocation
from torchround.engine.exchange.landings import Landings
from torchround.engine.exchange.step_exchange import StepExchange
from torchround.engine.passes import STAGE_JOB, Pass, StageJob
from torchround.engine.store.bundles import BOUNDED, Bundle
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import (
    DECISION,
    DIRECTION,
    GRADIENT,
    RECORDS,
    STATE,
    WEIGHTS,
    Access,
    Buffer,
    Task,
    Tasks,
    Worker,
)
from torchround.engine.update import Decision, Updater
from torchround.optim.host_optimizer import Hyperparameters
from torchround.planning.machine_shares import StepShare
from torchround.planning.partition import StageKind, StageTask, slots_before_late_jobs

# What a task of the host does; it gets the task.
Run = Callable[[Task], object]


class Program:
    """The tasks of an engine, in program order. Only the controller calls this.

    Tasks are declared one by one and handed out together at the end of each call, so that a stop cannot come between
    the tasks of an update.
    """

    def __init__(
        self,
        store: HostStore,
        tasks: Tasks,
        updater: Updater,
        saver: Worker,
        exchange: StepExchange,
        num_devices: int,
        accumulates: bool,
    ) -> None:
        self._store = store
        self._board = tasks.board
        self._tasks = tasks
        self._updater = updater
        self._saver = saver
        self._exchange = exchange
        self._num_devices = num_devices
        self._accumulates = accumulates
        self._is_foreign = updater.is_foreign  # a `HostOptimizer` updates
        self._is_bounded = store.policy is BOUNDED
        self._landings: Landings = exchange.landings
        self._directed = directed_bundles(store)
        versions = range(store.policy.versions)
        names = {b.index: ", ".join(store.layer_names[layer] for layer in b.layers) for b in store.trained}
        self._weights = {i: [Buffer(WEIGHTS, name) for _ in versions] for i, name in names.items()}
        self._states = {i: Buffer(STATE, name) for i, name in names.items()}
        self._gradients = {i: Buffer(GRADIENT, name) for i, name in names.items()}
        self._directions = {bundle.index: Buffer(DIRECTION, names[bundle.index]) for bundle in self._directed}
        self._records = Buffer(RECORDS)
        self._locations: dict[tuple[str, int], FaultLocation] = {}
        self._rounds = 0  # of the step that waits for its `step()`
        self._pass: Pass | None = None  # its newest call
        # By bundle, the last sum of a call (`bounded`): if it is the step's, the update comes right after it.
        self._last_sums: dict[int, tuple[Worker, Task]] = {}
        # The part of a step's program that comes among the stages of the next step, and that step.
        self._late: Callable[[int], tuple[int, ...]] | None = None
        self._late_step = 0
        self._host_tasks: list[tuple[Worker, Task]] = []
        self._jobs: list[StageJob | DirectionJob] = []

    # A step's calls.

    def training_pass(
        self, pass_: Pass, stages: Sequence[StageTask], first_slot: int
    ) -> tuple[tuple[int, ...], Task]:
        """Declare a call of a step: its stages, and what takes their gradients and losses.

        Returns the slots of direction jobs, and the task that ends the call.
        """
        share, step = pass_.share, pass_.step
        assert share is not None, f"step {step} was dispatched without a share"
        self.release_sums()
        num_forward, takings = _num_forward(stages), deque(self._takings(share))
        for stage in stages[:num_forward]:
            self._stage(pass_, stage, takings)
        # In the program before the first stage that writes gradients, which the late update reads. On the devices its
        # direction jobs may come a few stages later.
        slots = self.late_tasks(first_slot + self._slots_before_late(stages))
        if self._rounds == 0:
            self._write_lagging(step)
        for stage in stages[num_forward:]:
            self._stage(pass_, stage, takings)
        for _, bundle, parts in takings:
            self._take(pass_, bundle, parts)
        self._pass, self._rounds = pass_, share.total_rounds
        return slots, self._optimize(step, "the losses", lambda task: self._updater.end_pass(pass_))

    def evaluation(self, pass_: Pass, stages: Sequence[StageTask]) -> None:
        """Declare a pass without gradients."""
        for stage in stages:
            self._stage(pass_, stage, deque())

    def _stage(self, pass_: Pass, stage: StageTask, takings: "deque[tuple[int, Bundle, range]]") -> None:
        """Declare a stage job, and what takes the parts of gradients that it completes."""
        kind, layers = stage.stage.kind, range(stage.stage.start, stage.stage.stop)
        names = tuple(self._store.layer_names[layer] for layer in layers)
        task = Task("stage", pass_.step, FaultLocation(f"stage slot {stage.slot}", kind.value, names))
        uses = [
            (layer, bundle)
            for layer in layers
            for bundle in (self._store.bundles[index] for index in self._store.layer_bundles(layer))
            if bundle.trainable
        ]
        self._tasks.declare(
            task, [self._weights_of(b, pass_.version_read(b, layer, stage)) for layer, b in uses]
        )
        uploads = {(layer, b.index): access for (layer, b), access in zip(uses, task.accesses, strict=True)}
        parts: dict[tuple[int, int], Access] = {}
        made: set[int] = set()
        # In the order in which they land. What takes a part comes right after it: the next part may land in its memory.
        for layer, bundle in reversed(uses) if pass_.training and kind is not StageKind.FORWARD else ():
            self._tasks.declare(task, writes=[self._landing(bundle, bundle.layers[::-1].index(layer))])
            parts[layer, bundle.index] = task.accesses[-1]
            if layer == bundle.layers[0]:
                made.add(bundle.index)
            while takings and takings[0][0] == stage.round and takings[0][1].index in made:
                self._take(pass_, *takings.popleft()[1:])
        self._jobs.append(StageJob(stage, pass_, uploads, parts))

    def _takings(self, share: StepShare) -> Iterator[tuple[int, Bundle, range]]:
        """Yield bundles with the parts of their gradients that are taken together, after one round of this machine.

        One round of each machine makes these parts. All machines have the same order, from the deepest bundle up, so
        the earliest parts that are not added yet never wait for later ones.
        """
        machines = self._store.ownership.num_machines
        for local, first in enumerate(range(self._rounds, share.total_rounds, machines)):
            last = min(first + machines, share.total_rounds)
            for bundle in reversed(self._store.trained):
                yield local, bundle, range(first * len(bundle.layers), last * len(bundle.layers))

    def _take(self, pass_: Pass, bundle: Bundle, parts: range) -> None:
        """Declare what takes parts of a gradient: the optimizer, or the sender to the machine that owns the bundle."""
        step, share = pass_.step, pass_.share
        assert share is not None, f"step {step} was dispatched without a share"
        uses, is_whole = len(bundle.layers), parts.stop == share.total_rounds * len(bundle.layers)
        # Each machine has made one round of these parts, in the order of their numbers.
        makers = {part: (part - parts.start) // uses for part in parts}
        machine = self._store.ownership.machine
        landed = {part: self._landing(bundle, part % uses) for part in parts if makers[part] == machine}
        reads = [buffer for buffers in landed.values() for buffer in buffers]
        if not bundle.is_owned:
            sources = [buffers[0] for buffers in landed.values()]
            run = partial(self._exchange.send_gradient, bundle, step, list(landed), sources)
            if landed:
                self._emit(self._exchange.gradients_to[bundle.owner], "the sending", step, run, bundle, reads)
            return
        if bundle.adds_up:
            given = [landed[part][0] if part in landed else makers[part] for part in parts]
            add = partial(_ignore_task, self._updater.collect, bundle, step, parts, given)
            self._optimize(step, "the sum", add, bundle, reads, [self._gradients[bundle.index]])
            if self._is_bounded and is_whole:
                self._last_sums[bundle.index] = self._host_tasks.pop()
        # With several calls only `step` knows which part was the last one.
        if is_whole and not (self._is_bounded or self._accumulates):
            self._measure(step, bundle)

    def _measure(self, step: int, bundle: Bundle) -> None:
        """Declare the norm of a whole gradient. A look-ahead comes with it."""
        reads, writes = [self._gradients[bundle.index]], []
        if bundle.index in self._directions:
            reads.append(self._states[bundle.index])
            writes.append(self._directions[bundle.index])
        run = partial(_ignore_task, self._updater.measure, bundle, step)
        self._optimize(step, "the norm", run, bundle, reads, writes)

    def release_sums(self) -> None:
        """Let the last sums of a call run although `step` has not come, because a call waits for what they free."""
        self._host_tasks += self._last_sums.values()
        self._last_sums = {}

    def _write_lagging(self, step: int) -> None:
        for bundle in filter(self._store.lags, self._store.trained):
            if bundle.is_owned:
                run = partial(_ignore_task, self._updater.write_lagging, bundle)
                reads, writes = [self._states[bundle.index]], [self._weights_of(bundle, step)]
                self._optimize(step, "the older device weights", run, bundle, reads, writes)
            self._exchange_weights(bundle, step - 1, [], [], None)

    # A step's update.

    def step(self, lr: float, hyperparameters: Hyperparameters | None, slot: int) -> tuple[int, ...]:
        """Declare the update of a step. Returns the slots, from `slot` on, of direction jobs."""
        pass_ = self._pass
        assert pass_ is not None, "a step is updated before its first call"
        decision = Decision(pass_.step, lr, hyperparameters)
        if self._accumulates and not self._is_bounded:
            for bundle in reversed(self._store.owned):
                self._measure(pass_.step, bundle)
        self._pass, self._rounds = None, 0
        if self._directed and self._store.policy.versions > 1:
            self._late, self._late_step = partial(self._update, decision), pass_.step
            return ()
        return self._update(decision, slot)

    def late_tasks(self, slot: int) -> tuple[int, ...]:
        """Declare the rest of the newest step's program, if it is late. Returns the slots of its direction jobs."""
        late, self._late = self._late, None
        return () if late is None else late(slot)

    def is_late(self, step: int) -> bool:
        """Tell whether the update of a step is not declared yet, though its `step` was called."""
        return self._late is not None and step >= self._late_step

    def make_way(self, stages: list[StageTask]) -> list[StageTask]:
        """Return a step's stages with slots left free for direction jobs that are late.

        As many slots as devices, so that each stage keeps its device.
        """
        if self._late is None:
            return stages
        before = self._slots_before_late(stages)
        return [*stages[:before], *(replace(s, slot=s.slot + self._num_devices) for s in stages[before:])]

    def _slots_before_late(self, stages: Sequence[StageTask]) -> int:
        """Return the stages before late direction jobs: by then the gradients have landed, so few devices wait."""
        return slots_before_late_jobs(_num_forward(stages), len(stages), self._num_devices)

    def _update(self, decision: Decision, slot: int) -> tuple[int, ...]:
        """Declare the directions, the decision and the updates of a step."""
        step, decided = decision.step, Buffer(DECISION)
        slots = self._direct(step, slot)
        directions = [self._directions[bundle.index] for bundle in self._directed]
        self._optimize(
            step,
            "the decision",
            lambda task: self._updater.decide(decision, directions),
            reads=directions,
            writes=[self._records, decided],
        )
        if self._is_foreign:
            written = [
                b[bundle.index] for bundle in self._store.owned for b in (self._gradients, self._states)
            ]
            self._optimize(
                step,
                "the optimizer",
                lambda task: self._updater.step_host_optimizer(decision, task),
                writes=[*written, self._records],
            )
        # As the gradients of `bounded` are whole one after the other, otherwise as the next step's forward reads weights.
        for bundle in self._store.trained[:: -1 if self._is_bounded else 1]:
            # The next step's forward has to read device weights that lag before they are written.
            new = [] if self._store.lags(bundle) else [self._weights_of(bundle, step + 1)]
            # A skipped update copies them.
            old = [self._weights_of(bundle, step)] if self._store.policy.versions > 1 else []
            if bundle.is_owned:
                if self._is_bounded:
                    if bundle.index in self._last_sums:
                        self._host_tasks.append(self._last_sums.pop(bundle.index))
                    self._measure(step, bundle)
                reads = [self._gradients[bundle.index], *old]
                reads += [self._directions[bundle.index]] if bundle.index in self._directions else []
                run = partial(self._updater.update, decision, bundle)
                writes = [self._states[bundle.index], *new]
                self._optimize(step, "the update", run, bundle, reads, writes, self._updater.is_begun)
            if new:
                self._exchange_weights(bundle, step, [decided], old, decision)
        finish = partial(_ignore_task, self._updater.finish, decision)
        is_begun = self._updater.is_begun
        self._optimize(step, "the end", finish, writes=[self._records], is_essential=is_begun)
        return slots

    def _direct(self, step: int, slot: int) -> tuple[int, ...]:
        """Declare the direction jobs of a step, one for each device, if it has any.

        The bundles are dealt to the devices in turn, the first one to the device whose turn it is. Devices without a
        bundle get an empty job, because a device takes every `num_devices`-th slot.
        """
        if not self._directed:
            return ()
        for position in range(self._num_devices):
            bundles = tuple(self._directed[position :: self._num_devices])
            task = Task("directions", step, FaultLocation(f"stage slot {slot + position}"))
            buffers = [self._directions[bundle.index] for bundle in bundles]
            self._tasks.declare(task, writes=buffers)
            self._jobs.append(
                DirectionJob(slot + position, step, bundles, tuple(task.accesses), tuple(buffers))
            )
        return tuple(range(slot, slot + self._num_devices))

    # Between steps.

    def save(self, step: int, run: Run) -> Task:
        """Declare a save of the store as it is after the declared steps. Its first access is that of the records."""
        reads = [self._records]
        for bundle in self._store.owned:
            reads += [self._states[bundle.index], *self._weights[bundle.index]]
        return self._emit(self._saver, "the save", step, run, None, reads)

    def rewrite(self, step: int) -> Task:
        """Declare the rewriting of device weights that are not the fp32 weights. The caller runs it."""
        untrue = self._store.untrue_bundles()
        writes = [self._weights_of(b, step - self._store.lags(b)) for b in untrue]
        # Older device weights wait there meanwhile.
        writes += [self._gradients[b.index] for b in untrue if self._store.lags(b)]
        task = Task("the rewriting of device weights", step, FaultLocation("controller"))
        return self._tasks.declare(task, [self._states[b.index] for b in untrue if b.is_owned], writes)

    def share_rewritten(self, version: int) -> None:
        """Declare the exchange of device weights of a version that each owner has written anew."""
        for bundle in self._store.untrue_bundles():
            self._exchange_weights(bundle, version - 1, [], [], None)

    def _exchange_weights(
        self, bundle: Bundle, step: int, decided: list[Buffer], old: list[Buffer], decision: Decision | None
    ) -> None:
        """Declare what sends the device weights after `step` to all machines, or receives them from their owner."""
        new = self._weights_of(bundle, step + 1)
        for peer in self._exchange.peers if bundle.is_owned else ():
            run = partial(self._exchange.send_weights, peer, bundle, step + 1, decision)
            self._emit(self._exchange.weights_to[peer], "the sending", step, run, bundle, [*decided, new])
        if not bundle.is_owned:
            receives = partial(
                self._exchange.receive_weights, bundle, step + 1, decision, self._updater.copy_version
            )
            source = self._exchange.weights_from[bundle.owner]
            self._emit(source, "the receiving", step, receives, bundle, [*decided, *old], [new])

    # Memory and workers.

    def hand_out(self) -> None:
        """Let the workers run what is declared."""
        # Direction jobs first: a device that had to wait for its job would first send off gradients, and those of this
        # step land only after the job.
        for job in sorted(self._jobs, key=lambda job: isinstance(job, StageJob)):
            self._board.post(STAGE_JOB(job.slot), job)
        by_worker: dict[Worker, list[Task]] = {}
        for worker, task in self._host_tasks:
            by_worker.setdefault(worker, []).append(task)
        self._jobs, self._host_tasks = [], []
        for worker, tasks in by_worker.items():
            worker.put(tasks)

    def _weights_of(self, bundle: Bundle, version: int) -> Buffer:
        versions = self._weights[bundle.index]
        return versions[version % len(versions)]

    def _landing(self, bundle: Bundle, use: int) -> Sequence[Buffer]:
        """Return where a part of a bundle's gradient lands: as the whole sum, or in memory of parts."""
        return self._landings.buffers(bundle, use) if bundle.adds_up else [self._gradients[bundle.index]]

    def _optimize(
        self,
        step: int,
        name: str,
        run: Run,
        bundle: Bundle | None = None,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        is_essential: Callable[[int], bool] | None = None,
    ) -> Task:
        task = self._emit(self._updater.worker, name, step, run, bundle, reads, writes)
        task.is_essential = is_essential
        return task

    def _emit(
        self,
        worker: Worker,
        name: str,
        step: int,
        run: Run,
        bundle: Bundle | None = None,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> Task:
        if bundle is None:
            location = FaultLocation(worker.actor)
        else:
            location = self._locations.setdefault(
                (worker.actor, bundle.index), self._location(worker, bundle)
            )
        task = self._tasks.declare(Task(name, step, location, run), reads, writes)
        self._host_tasks.append((worker, task))
        return task

    def _location(self, worker: Worker, bundle: Bundle) -> FaultLocation:
        return FaultLocation(
            worker.actor, layers=tuple(self._store.layer_names[layer] for layer in bundle.layers)
        )


def _num_forward(stages: Sequence[StageTask]) -> int:
    return next((i for i, stage in enumerate(stages) if stage.stage.kind is not StageKind.FORWARD), 0)


def _ignore_task(run: Callable[..., object], *arguments: object) -> None:
    run(*arguments[:-1])

"""The program of a run: which tasks a step, an evaluation, a save or a rewrite has, in which order, and their memory.

This file alone determines who writes what and when in a step, a save and a validation: the tasks wait for each other by the
order of the calls here (`tasks.py`). An update mode is a place in this order (`docs/engine.md`).

    task, in the order of a step      worker     reads                                       writes
    a stage                           device     device weights                              gradient or a part of it
    the sum of parts                  optimizer  parts of a gradient                         gradient
    sending of gradients              peer       parts of a gradient
    the stale device weights          optimizer  state                                       device weights (`bounded`)
    the norm                          optimizer  gradient, state                             direction (look-ahead)
    directions                        device                                                 direction
    the decision                      optimizer  directions                                  decision, records
    the optimizer (`HostOptimizer`)   optimizer                                              state, gradients, records
    the update                        optimizer  gradient, direction, older device weights   state, new device weights
    sending of weights                peer       decision, device weights
    receiving of weights              peer       decision, older device weights              new device weights
    the end                           optimizer                                              records
    (With several versions, directions and all after them are deferred: they come among the next step's stages.)
    a save                            saver      records, state, device weights
    the rewriting for a validation    caller     state                                       device weights, gradient

State includes the fp32 weights. The section "Tasks that write weights" declares each task that does, by methods of
`HostStore` (`store/host_store.py`), whose table has the writers outside steps too.
What the other tasks do is in `worker/device_worker.py`, `update.py`, `exchange.py` (peers) and `saver.py`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchround.engine import tasks
from torchround.engine.board import Queue
from torchround.engine.errors import FaultLocation
from torchround.engine.exchange import StepExchange
from torchround.engine.passes import DeviceJob, Pass, StageJob
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access, Buffer, Task, Worker
from torchround.engine.update import Decision, Updater
from torchround.engine.worker.orthogonalise import DirectionJob, directed_bundles
from torchround.optim.host_optimizer import Hyperparameters
from torchround.planning.partition import StageKind, StageTask, slots_before_late_jobs


@dataclass(eq=False, repr=False)
class Program:
    """The tasks of an engine, in program order. Only the controller calls this.

    Tasks are declared one by one and handed out together at the end of each call, so that a stop cannot come between
    the tasks of an update. `open_pass` is the newest call of the step that waits for its `step()`, `rounds` those of its calls.
    """

    store: HostStore
    updater: Updater
    saver: Worker
    exchange: StepExchange
    queues: Sequence[Queue[DeviceJob]]
    accumulates: bool

    def __post_init__(self) -> None:
        store = self.store
        self._num_devices = len(self.queues)
        self._updates_by_layer = store.mode.updates_by_layer
        self._directed = directed_bundles(store)
        names = {b.index: b.name for b in store.trained}
        versions = range(store.mode.versions)
        self._weights = {i: [Buffer(tasks.WEIGHTS, name) for _ in versions] for i, name in names.items()}
        self._states = {i: Buffer(tasks.STATE, name) for i, name in names.items()}
        self._gradients = {i: Buffer(tasks.GRADIENT, name) for i, name in names.items()}
        self._directions = {b.index: Buffer(tasks.DIRECTION, names[b.index]) for b in self._directed}
        self._records = Buffer(tasks.RECORDS)
        self.next_slot = 0
        self.next_step = store.step
        self.rounds = 0
        self.open_pass: Pass | None = None
        # By bundle, the last sum of a call (`bounded`), which is not handed out yet: it has its place among the accesses, but
        # runs right before the update, which only `step` declares.
        self._held_sums: dict[int, Task] = {}
        # Of the step whose update is deferred: it comes among the stages of the next step (`async` with directions).
        self._deferred: Decision | None = None
        self._host_tasks: defaultdict[Worker, list[Task]] = defaultdict(list)
        self._jobs: list[StageJob | DirectionJob] = []

    # Passes.

    def add(self, pass_: Pass, stages: Sequence[StageTask]) -> Task | None:
        """Declare the stages of a pass, and for a call of a step what takes their gradients and the task that ends the call.

        Returns that task, or None for an evaluation.
        """
        share, step, first_slot = pass_.share, pass_.step, self.next_slot
        self.next_slot += len(stages)
        if share is None:
            for stage in stages:
                self._stage(pass_, stage)
            return None
        self.hand_out_sums()
        num_forward = _num_forward(stages)
        for stage in stages[:num_forward]:
            self._stage(pass_, stage)
        # In the program before the first stage that writes gradients, which the deferred update reads. On the
        # devices its direction jobs may come a few stages later.
        self._declare_deferred(first_slot + self._slots_before_deferred(stages))
        if self.rounds == 0:
            self._write_stale(step)
        for stage in stages[num_forward:]:
            self._stage(pass_, stage)
        # This machine may have no part in the last rounds.
        num_rounds = -(-(share.total_rounds - self.rounds) // share.num_machines)
        for round_ in range(len(share.rounds), num_rounds):
            for bundle in reversed(self.store.trained):
                self._take_parts(pass_, bundle, round_)
        self.open_pass, self.rounds = pass_, share.total_rounds
        return self._emit(self.updater, "the losses", step, partial(self.updater.end_pass, pass_))

    def _stage(self, pass_: Pass, stage: StageTask) -> None:
        """Declare a stage job, and the tasks that take the parts of gradients that it completes."""
        kind, layers = stage.stage.kind, range(stage.stage.start, stage.stage.stop)
        location = FaultLocation(f"stage slot {stage.slot}", kind.value, self._names(layers))
        task = Task("stage", pass_.step, location)
        uses = [(layer, b) for layer in layers for b in self.store.layer_bundles(layer) if b.trainable]
        task.declare([self._weights_of(b, pass_.version_read(b, layer, stage)) for layer, b in uses])
        uploads = {(layer, b.index): access for (layer, b), access in zip(uses, task.accesses, strict=True)}
        parts: dict[tuple[int, int], Access] = {}
        # In the order in which they land. What takes a part comes right after it: the next part may land in its memory.
        for layer, bundle in reversed(uses) if pass_.training and kind is not StageKind.FORWARD else ():
            task.declare(writes=[self._landing(bundle, bundle.layers[::-1].index(layer))])
            parts[layer, bundle.index] = task.accesses[-1]
            if layer == bundle.layers[0]:
                self._take_parts(pass_, bundle, stage.round)
        task.accesses = []  # the job has them
        self._jobs.append(StageJob(stage, pass_, uploads, parts))

    def _take_parts(self, pass_: Pass, bundle: Bundle, round_: int) -> None:
        """Declare the task for the parts of a gradient that one round of each machine makes.

        It is the optimizer's, or the sender's to the machine that owns the bundle. All machines have the same order, from the
        deepest bundle up, so the earliest parts never wait for later ones.
        """
        share, step, uses = pass_.share, pass_.step, len(bundle.layers)
        assert share is not None, f"step {step} was dispatched without a share"
        first = self.rounds + round_ * share.num_machines
        last = min(first + share.num_machines, share.total_rounds)
        parts, is_whole = range(first * uses, last * uses), last == share.total_rounds
        makers = {part: part // uses - first for part in parts}
        landed = {p: self._landing(bundle, p % uses) for p in parts if makers[p] == share.machine}
        reads = list(landed.values())
        if not bundle.is_owned:
            run = partial(self.exchange.send_gradient, bundle, step, landed)
            if landed:
                sender = self.exchange.gradients_to[bundle.owner]
                self._emit(sender, "the sending of gradients", step, run, bundle, reads)
            return
        if bundle.adds_up:
            given = [landed.get(part, makers[part]) for part in parts]
            run = partial(self.exchange.add, bundle, step, parts, given)
            writes, is_held = [self._gradients[bundle.index]], self._updates_by_layer and is_whole
            task = self._emit(self.updater, "the sum", step, run, bundle, reads, writes, is_held)
            if is_held:
                self._held_sums[bundle.index] = task
        # With several calls only `step` knows which part was the last one.
        if is_whole and not (self._updates_by_layer or self.accumulates):
            self._measure(step, bundle)

    def _measure(self, step: int, bundle: Bundle) -> None:
        """Declare the norm of a whole gradient. A look-ahead comes with it."""
        reads, writes = [self._gradients[bundle.index]], list[Buffer]()
        if bundle.index in self._directions:
            reads.append(self._states[bundle.index])
            writes.append(self._directions[bundle.index])
        run = partial(self.updater.measure_gradient, bundle, step)
        self._emit(self.updater, "the norm", step, run, bundle, reads, writes)

    def hand_out_sums(self) -> None:
        """Let the held sums of a call run although `step` has not come, because a call waits for what they free."""
        for task in self._held_sums.values():
            self._host_tasks[self.updater].append(task)
        self._held_sums = {}

    # A step's update.

    def step(self, lr: float, hyperparameters: Hyperparameters | None) -> None:
        """Declare the update of the open step, or defer it: then it comes among the stages of the next step."""
        pass_ = self.open_pass
        assert pass_ is not None, "a step is updated before its first call"
        decision = Decision(pass_.step, pass_.updated, lr, hyperparameters)
        if self.accumulates and not self._updates_by_layer:
            for bundle in reversed(self.store.owned):
                self._measure(pass_.step, bundle)
        if self._directed and self.store.mode.versions > 1:
            self._deferred = decision
        else:
            self._update(decision, self.next_slot)
        # Last, and before anything is handed out: after an interrupt no step must seem to lack an update that runs.
        self.next_step += 1
        self.open_pass, self.rounds = None, 0

    def _declare_deferred(self, slot: int) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._update(deferred, slot)

    def defers(self, step: int) -> bool:
        return self._deferred is not None and step >= self._deferred.step

    def make_way(self, stages: list[StageTask]) -> list[StageTask]:
        """Leave slots free among a step's stages for the direction jobs of a deferred update, one for each device."""
        if self._deferred is None:
            return stages
        before = self._slots_before_deferred(stages)
        return [*stages[:before], *(replace(s, slot=s.slot + self._num_devices) for s in stages[before:])]

    def _slots_before_deferred(self, stages: Sequence[StageTask]) -> int:
        # By then the gradients have landed, so few devices wait.
        return slots_before_late_jobs(_num_forward(stages), len(stages), self._num_devices)

    # Between steps.

    def save(self, run: Callable[[], object]) -> Task:
        """Declare a save of the store as it is after the declared steps. Its first access is that of the records."""
        reads = [self._records]
        for bundle in self.store.owned:
            reads += [self._states[bundle.index], *self._weights[bundle.index]]
        return self._emit(self.saver, "the save", self.next_step, run, reads=reads)

    # Tasks that write weights.

    def _write_stale(self, step: int) -> None:
        for bundle in filter(self.store.lags, self.store.trained):
            if bundle.is_owned:
                run = partial(self.updater.write_stale, bundle, step)
                reads, writes = [self._states[bundle.index]], [self._weights_of(bundle, step)]
                self._emit(self.updater, "the stale device weights", step, run, bundle, reads, writes)
            self._exchange_weights(bundle, step)

    def _update(self, decision: Decision, slot: int) -> None:
        step, updater = decision.step, self.updater
        # The bundles are dealt to the devices in turn. A device without one gets an empty job, because it takes every
        # `num_devices`-th slot.
        for first in range(self._num_devices) if self._directed else ():
            bundles = tuple(self._directed[first :: self._num_devices])
            task = Task("directions", step, FaultLocation(f"stage slot {slot + first}"))
            task.declare(writes=[self._directions[bundle.index] for bundle in bundles])
            self._jobs.append(DirectionJob(slot + first, step, bundles, tuple(task.accesses)))
            task.accesses = []  # the job has them
            self.next_slot += 1
        directions = list(self._directions.values())
        run = partial(updater.decide, decision, directions)
        self._emit(
            updater, "the decision", step, run, reads=directions, writes=[self._records, decision.made]
        )
        if decision.hyperparameters is not None:  # those of a `HostOptimizer`
            written = [b[o.index] for o in self.store.owned for b in (self._gradients, self._states)]
            run = partial(updater.step_host_optimizer, decision)
            self._emit(updater, "the optimizer", step, run, writes=[*written, self._records])
        # As the gradients of `bounded` are whole one after the other, otherwise as the next step's forward reads weights.
        for bundle in self.store.trained[:: -1 if self._updates_by_layer else 1]:
            # The next step's forward has to read device weights that lag before they are written.
            new = [] if self.store.lags(bundle) else [self._weights_of(bundle, step + 1)]
            if bundle.is_owned:
                if self._updates_by_layer:
                    if bundle.index in self._held_sums:
                        self._host_tasks[updater].append(self._held_sums.pop(bundle.index))
                    self._measure(step, bundle)
                reads = [self._gradients[bundle.index], *self._copied_if_skipped(bundle, step)]
                reads += [self._directions[bundle.index]] if bundle.index in self._directions else []
                writes = [self._states[bundle.index], *new]
                run = partial(updater.update, decision, bundle)
                self._emit(updater, "the update", step, run, bundle, reads, writes)
            if new:
                self._exchange_weights(bundle, step + 1, decision)
        self._emit(updater, "the end", step, partial(updater.finish, decision), writes=[self._records])

    def rewrite(self) -> Task:
        """Declare the rewriting of device weights that are not the fp32 weights. The caller runs it."""
        step, rewritten = self.next_step, self.store.stale_or_predicted()
        writes = [self._weights_of(b, step - self.store.lags(b)) for b in rewritten]
        # The device weights of before wait there meanwhile.
        writes += [self._gradients[b.index] for b in rewritten if b.is_owned]
        task = Task("the rewriting of device weights", step, FaultLocation("controller"))
        return task.declare([self._states[b.index] for b in rewritten if b.is_owned], writes)

    def share_rewritten(self) -> None:
        for bundle in self.store.stale_or_predicted():
            self._exchange_weights(bundle, self.next_step)

    def _copied_if_skipped(self, bundle: Bundle, step: int) -> list[Buffer]:
        return [self._weights_of(bundle, step)] if self.store.mode.versions > 1 else []

    def _exchange_weights(self, bundle: Bundle, version: int, decision: Decision | None = None) -> None:
        """Declare what sends a version of device weights to all machines, or receives it from their owner.

        If the `decision` is not to apply, each machine copies the version before.
        """
        exchange, new, step = self.exchange, self._weights_of(bundle, version), version - 1
        reads = [] if decision is None else [decision.made]

        def send(peer: int) -> None:
            if decision is None or decision.applies:
                exchange.send_weights(peer, bundle, version)

        def receive() -> None:
            if decision is None or decision.applies:
                exchange.receive_weights(bundle, version)
            else:
                self.store.copy_version(bundle, step)

        if not bundle.is_owned:
            source = exchange.weights_from[bundle.owner]
            reads += [] if decision is None else self._copied_if_skipped(bundle, step)
            self._emit(source, "the receiving of weights", step, receive, bundle, reads, [new])
            return
        for peer in exchange.peers:
            sender, run = exchange.weights_to[peer], partial(send, peer)
            self._emit(sender, "the sending of weights", step, run, bundle, [*reads, new])

    # Memory and workers.

    def hand_out(self, with_deferred: bool = False) -> None:
        """Let devices and workers run what is declared, `with_deferred` also a deferred update."""
        if with_deferred:
            self._declare_deferred(self.next_slot)
        jobs = sorted(self._jobs, key=lambda job: job.slot)
        for device, queue in enumerate(self.queues):
            # Together: a device that waited for a direction job would first send off gradients, which land only after it.
            queue.put(*(job for job in jobs if job.slot % self._num_devices == device))
        for worker, declared in self._host_tasks.items():
            worker.put(declared)
        self._jobs, self._host_tasks = [], defaultdict(list)

    def _weights_of(self, bundle: Bundle, version: int) -> Buffer:
        versions = self._weights[bundle.index]
        return versions[version % len(versions)]

    def _landing(self, bundle: Bundle, use: int) -> Buffer:
        return self.exchange.landings[bundle.index, use] if bundle.adds_up else self._gradients[bundle.index]

    def _emit(
        self,
        worker: Worker,
        name: str,
        step: int,
        run: Callable[[], object],
        bundle: Bundle | None = None,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        is_held: bool = False,
    ) -> Task:
        """Declare a task of the host. Unless it is held, it is handed out with the others of this call."""
        location = FaultLocation(worker.actor, layers=self._names(bundle.layers if bundle else ()))
        task = Task(name, step, location, run, worker).declare(reads, writes)
        if not is_held:
            self._host_tasks[worker].append(task)
        return task

    def _names(self, layers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.store.layer_names[layer] for layer in layers)


def _num_forward(stages: Sequence[StageTask]) -> int:
    return next((i for i, stage in enumerate(stages) if stage.stage.kind is not StageKind.FORWARD), 0)

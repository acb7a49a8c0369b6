"""The training loop: what happens in a run, in time order.

A step is dispatched before the one before it is reported, so that reporting never keeps the devices waiting.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchround.checkpoint import CheckpointError
from torchround.config import Config
from torchround.data import DataError, cut
from torchround.data.loader import Loader
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import Device
from torchround.engine.engine import Engine
from torchround.engine.results import StepResult
from torchround.engine.store.host_store import HostStore
from torchround.engine.tracing import StepTraces
from torchround.engine.worker.link_turns import find_link_use
from torchround.hf import PretrainedWeights, WithAdapters
from torchround.layer import LayeredModel, MicroBatch, with_dropout_seeds
from torchround.observe import MetricsLogger, open_metrics
from torchround.observe.loss_curve import draw_run
from torchround.optim import LRSchedule
from torchround.pipeline.plan import Plan
from torchround.pipeline.plan_report import RunQuestion
from torchround.pipeline.shared_links import LinkUse
from torchround.run.checkpoints import RunCheckpoints, RunPosition
from torchround.run.early_end import BadSteps, StopRequest
from torchround.run.engine_parts import build_engine, build_store, layer_compiler
from torchround.run.hardware import Hardware
from torchround.run.numbers import RunNumbers
from torchround.run.run_folder import RunFolder
from torchround.run.run_plan import PlanByMeasuring
from torchround.run.step_meter import StepMeter, flops_per_token
from torchround.run.validation import Validation
from torchround.untrusted.terminal import say

logger = logging.getLogger(__name__)

COMPLETE = "the run is complete", 0


@dataclass(frozen=True)
class Dispatched:
    """A step under way: its result to come, and where the run is after it."""

    result: StepResult
    position: RunPosition
    lr: float
    num_tokens: int


@dataclass(frozen=True)
class RunParts:
    """All that a trainer needs, checked against each other; nothing large is allocated yet.

    `loader` is at the start of the data. `validation` gives the same batches each time it is iterated over. `plan` is the
    answer to `question`. `mapped` are the frozen weights that stay in their files, by parameter name.
    """

    config: Config
    folder: RunFolder
    model: LayeredModel
    loader: Loader
    validation: Iterable[MicroBatch]
    numbers: RunNumbers
    hardware: Hardware
    question: RunQuestion
    plan: Plan
    pretrained: PretrainedWeights | WithAdapters | None
    mapped: Mapping[str, Sequence[Tensor]]


class Trainer:
    """One run in its folder, from its start or from its newest checkpoint. Nothing large is allocated before `run`."""

    def __init__(self, parts: RunParts) -> None:
        config, folder = parts.config, parts.folder
        self.config = config
        self._parts = parts
        self._numbers = parts.numbers
        self._folder = folder
        self._model = parts.model
        self._loader = parts.loader
        self._validation = Validation(parts.validation, config.training.micro_batch_size)
        self._choice = parts.hardware
        self._checkpoints = RunCheckpoints(config, folder)
        self._schedule = LRSchedule(config.lr_schedule, config.optimizer.lr, config.training.steps)
        self._bad_steps = BadSteps(config.training)
        self._metrics = MetricsLogger({})
        self._under_way: deque[Dispatched] = deque()

    @cached_property
    def store(self) -> HostStore:
        """All weights, gradients and optimizer state, allocated when first asked for."""
        return build_store(self._model, self._numbers, self._choice, self._parts.mapped)

    @cached_property
    def _compiler(self) -> LayerCompiler | None:
        """Outlives the engines: the one that measures and the one after it run the same layers."""
        return layer_compiler(self._model, self.config.engine)

    @cached_property
    def _traces(self) -> StepTraces:
        folder = self._folder.path / "trace"
        return StepTraces(self.config.trace, folder, self._devices, self.config.training.steps)

    @cached_property
    def _devices(self) -> Sequence[Device]:
        return self._choice.make_devices()

    @cached_property
    def _links(self) -> LinkUse:
        """Measured when first asked for: before the first engine, whose devices must be empty."""
        return find_link_use(self.config.engine.share_links, self._devices, self.store)

    @cached_property
    def _meter(self) -> StepMeter:
        training, spec = self.config.training, self._choice.spec
        return StepMeter(
            self._devices,
            flops_per_token(self._model, training.seq_len, self._numbers.dtype.itemsize),
            None if spec is None else spec.peak_flops.get(training.dtype),
            self._checkpoints.skipped_steps,
        )

    def run(self) -> int:
        """Train to the end, or until a signal. Returns the exit code of the process.

        Raises `ResumeError`, `RunFolderError`, `CheckpointError`, `DataError`, `BadStepsError` or `PipelineError`;
        whatever could be saved is saved before.
        """
        newest = self._checkpoints.complete_step()
        if newest is not None:
            say(
                f"{self._folder.path}: the run is complete after {newest} steps; nothing to do "
                "(a higher training.steps would go on)"
            )
            return 0
        if not self._checkpoints.restore(self.store, self._loader):
            self._initialize()
        self._metrics = self._open_metrics()
        # To the last line: closing may take seconds, and what is saved did not fail.
        with StopRequest() as stop:
            try:
                ended_by, exit_code = self._measure_and_train(stop)
            finally:
                self._metrics.close()
                self._loader.close()
                self.store.close()
            draw_run(self._folder.path)
            self._say_what_was_left_out()
            saved, steps = self._checkpoints.saved_step, self.config.training.steps
            say(f"{self._folder.path}: saved after step {saved} of {steps}; {ended_by}")
        return exit_code

    def _measure_and_train(self, stop: StopRequest) -> tuple[str, int]:
        """Steps that measure, the plan that stays, all other steps. Returns as `_train`."""
        kept = self._folder.kept_plan() if self._position.step else None
        self._meter.start()
        planning = PlanByMeasuring(
            self._parts.question,
            self._parts.plan,
            kept,
            self._position.step,
            self.config.engine.measure_steps,
            self.config.training.steps,
        )
        say(planning.text())
        if self._links.text:
            say(self._links.text)
        self._folder.describe(self.config, planning.settled)
        if self._position.step < planning.until:
            with self._running_engine(planning.measuring) as engine:
                end = self._train(engine, stop, planning.until, measured_by=planning)
            if end is not None or planning.until == self.config.training.steps:
                return end or COMPLETE
            with self._meter.excluded():
                planning.settle()
            say(f"planned again from {self.config.engine.measure_steps} measured steps:\n{planning.settled}")
            self._folder.describe(self.config, planning.settled)
        with self._running_engine(planning.settled) as engine:
            return self._train(engine, stop, self.config.training.steps) or COMPLETE

    def _train(
        self, engine: Engine, stop: StopRequest, until: int, measured_by: PlanByMeasuring | None = None
    ) -> tuple[str, int] | None:
        """The loop, up to step `until`. Returns why it ended before, and the exit code that says so."""
        end = None
        while self._position.step < until and self._bad_steps.error is None:
            if stop.requested:
                end = "run the same command to go on", stop.exit_code
                break
            batch = self._next_batch(engine)
            if batch is None:
                end = "the data has come to its end", 0
                break
            result = self._dispatch(engine, batch)
            if measured_by is not None:
                measured_by.add(result)
            self._report_steps(leave=1)
            if self._is_due(self.config.validation.interval_steps):
                self._report_steps(leave=0, validation_loss=self._validate(engine))
            if self._is_due(self.config.checkpoint.interval_steps):
                self._checkpoints.begin_save(engine)
        self._report_steps(leave=0)
        self._checkpoints.finish_saves()
        bad = self._bad_steps.error
        if end is not None or bad is not None or until == self.config.training.steps:
            self._save(engine)
        if bad is not None:
            raise bad
        return end

    # One step.

    @property
    def _position(self) -> RunPosition:
        return self._checkpoints.position

    def _next_batch(self, engine: Engine) -> MicroBatch | None:
        """The next batch, None at the end of the data."""
        try:
            with self._meter.waiting_for_data():
                return next(self._loader, None)
        except DataError:
            # The fault is in what comes next: the steps before it are finished, and saved on the way out.
            self._report_steps(leave=0)
            engine.drain()
            raise

    def _dispatch(self, engine: Engine, batch: MicroBatch) -> StepResult:
        lr = self._schedule(self._position.step)
        self._traces.before_dispatch(self._position.step + 1)
        parts = cut(batch, self.config.training.micro_batch_size)
        result = engine.forward_backward(with_dropout_seeds(parts, self.config.run.seed, self._position.step))
        engine.step(lr)
        position = RunPosition(
            self._position.step + 1, self._position.tokens + result.num_labels, self._loader.state_dict()
        )
        self._checkpoints.positions.append(position)
        self._under_way.append(Dispatched(result, position, lr, self._loader.num_tokens(batch)))
        return result

    def _report_steps(self, leave: int, validation_loss: float | None = None) -> None:
        """Wait for all but the newest `leave` steps, and log those that are due."""
        while len(self._under_way) > leave:
            done = self._under_way[0]
            self._meter.add(done.result, done.num_tokens)
            self._traces.add(done.result)
            tokens_before = done.position.tokens - done.result.num_labels
            self._bad_steps.add(done.position.step, tokens_before, done.result)
            if self._should_log(done.position.step) or validation_loss is not None:
                self._metrics.log(
                    self._meter.record(done.position.step, done.position.tokens, done.lr, validation_loss)
                )
            self._under_way.popleft()
            self._checkpoints.reported(done.position.step)

    def _validate(self, engine: Engine) -> float | None:
        engine.drain()  # the step under way counts as training time
        with self._meter.excluded():
            return self._validation.loss(engine)

    def _is_due(self, interval_steps: int) -> bool:
        return interval_steps > 0 and self._position.step % interval_steps == 0

    def _should_log(self, step: int) -> bool:
        return step % self.config.metrics.log_every_steps == 0 or step == self.config.training.steps

    def _say_what_was_left_out(self) -> None:
        counts = self._loader.counts()
        if counts.bad_records:
            say(f"bad records skipped: {counts.bad_records}")
        if counts.long_documents:
            handled = self.config.data.long_documents
            say(f"documents longer than a sequence: {counts.long_documents} (long_documents = {handled})")

    # Start, checkpoints, end.

    def _initialize(self) -> None:
        seed, pretrained = (
            self.config.run.seed,
            self._checkpoints.starting_weights() or self._parts.pretrained,
        )
        if pretrained is None:
            say(f"{self._folder.path}: a new run; initialising weights from seed {seed}")
            self.store.initialize(self._model, seed)
        else:
            say(f"{self._folder.path}: a new run; reading its weights from {pretrained.folder}")
            self.store.initialize(self._model, seed, pretrained.load)

    def _open_metrics(self) -> MetricsLogger:
        metrics = open_metrics(
            self.config.metrics,
            self._folder.path,
            self.config.run.name,
            self.config.training.steps,
            self.config.model_dump(mode="json"),
            resumed_step=self._position.step,
            wandb_run_id=self._checkpoints.wandb_run_id,
        )
        self._checkpoints.wandb_run_id = metrics.wandb_run_id
        return metrics

    @contextmanager
    def _running_engine(self, plan: Plan) -> Iterator[Engine]:
        """An engine for the block. After a fault, the state that it left is saved."""
        config = self.config
        with self._meter.excluded():
            engine = build_engine(
                self._model,
                self.store,
                self._devices,
                plan,
                self._numbers,
                config.optimizer,
                self._compiler,
                self._links.turns,
            )
        self._traces.start()
        try:
            with engine:
                yield engine
            self._traces.finish()
        except CheckpointError:
            raise
        except Exception:
            self._checkpoints.end_saves()
            self._report_finished()
            self._checkpoints.rescue(self.store)
            raise

    def _report_finished(self) -> None:
        """After a fault: the steps whose update is complete, as far as they can still be told."""
        unfinished = sum(step.position.step > self.store.step for step in self._under_way)
        try:
            self._report_steps(leave=unfinished)
        except Exception as error:  # noqa: BLE001  (the fault itself is what is raised)
            logger.warning("step %d is missing in the metrics: %s", self._under_way[0].position.step, error)

    def _save(self, engine: Engine) -> None:
        """Save where the run is now, and wait for it. Raises `CheckpointError`."""
        self._report_steps(leave=0)
        engine.drain()  # what is under way counts as training time
        with self._meter.excluded():
            self._checkpoints.save_now(engine)

"""The training loop: what happens in a run, in time order."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torchround.accelerators import accumulating_in_fp16
from torchround.checkpoint import CheckpointError
from torchround.data import DataError
from torchround.data.step_batches import StepBatch
from torchround.engine.engine import Engine
from torchround.engine.passes import StepResult
from torchround.engine.store.host_store import HostStore
from torchround.engine.tracing import StepTraces
from torchround.observe.logger import MetricsLogger
from torchround.observe.run_page import draw_pictures
from torchround.optim import LRSchedule
from torchround.planning.plan import Plan
from torchround.run.checkpoints import RunCheckpoints, RunPosition
from torchround.run.early_end import BadSteps, StopRequest
from torchround.run.engine_parts import RunParts, build_engine, build_store, layer_compiler, reserve_buffers
from torchround.run.run_folder import RunError, disk_need
from torchround.run.run_plan import PlanByMeasuring
from torchround.run.step_meter import Dispatched, StepReports
from torchround.run.validation import RunValidation, Validated
from torchround.untrusted.terminal import Progress, say

logger = logging.getLogger(__name__)

HIGH_LR = 0.1  # no optimizer here trains a model with a rate above it

# How a run ends that trains its last step: why, for the console, and the exit code.
COMPLETE = "the run is complete", 0


class Trainer:
    """One run in its folder, from its start or from its newest checkpoint.

    The constructor allocates, measures and reads nothing; `run` makes what a run needs, in time order.
    """

    store: HostStore
    """All weights, gradients and optimizer state. `run` allocates it."""

    def __init__(self, parts: RunParts) -> None:
        config = parts.config
        self.config = config
        self._parts = parts
        self._machines = parts.machines
        self._folder = parts.folder
        self._loader = parts.loader
        self._checkpoints = RunCheckpoints(config, parts.folder)
        self._total_steps = config.training.num_steps
        self._schedule = LRSchedule(config.lr_schedule, config.optimizer.lr, self._total_steps)
        self._bad_steps = BadSteps(config.training)
        micro_batch_size = config.training.micro_batch_size
        self._validation = RunValidation(
            config.validation, parts.validation, micro_batch_size, parts.machines
        )
        self._metrics = MetricsLogger({})

    def run(self) -> int:
        """Train to the end, or until a signal. Returns the exit code of the process.

        Raises `RunError`, `CheckpointError`, `DataError`, `BadStepsError` or `PipelineError`, after
        saving what can be saved.
        """
        parts, folder, machines = self._parts, self._folder, self._machines
        newest = self._checkpoints.complete_step(self._loader)
        if newest is not None:
            say(
                f"{folder.path}: the run is complete after {newest} steps; nothing to do (raise training.steps or "
                "data.epochs to continue)"
            )
            return 0
        room = disk_need(self.config, folder, parts.question)
        machines.same_mistakes(room.require_one, (RunError,), "whether checkpoints have room")
        self.store = build_store(
            parts.model, parts.numbers, parts.hardware, parts.mapped, machines.ownership()
        )
        # One compiler for all engines of the run: the one that measures and the one after it run the same layers.
        self._compiler = layer_compiler(parts.model, self.config.engine, parts.hardware.kind)
        self._devices = parts.hardware.make_devices()
        traces = StepTraces(self.config.trace, folder.path / "trace", self._devices, self._total_steps)
        self._traces = traces
        if not self._checkpoints.restore(self.store, self._loader):
            self._initialize()
        # Each machine has filled what it owns.
        machines.share_weights(self.store)
        self._metrics = parts.open_metrics(self._position.step, self._checkpoints.wandb_run_id)
        self._checkpoints.wandb_run_id = self._metrics.wandb_run_id
        in_fp16 = self.config.training.fp16_accumulation
        # Signals are caught up to the last line: closing may take seconds, and a saved run must not end as a killed one.
        with StopRequest(machines.names) as stop:
            try:
                with accumulating_in_fp16() if in_fp16 else nullcontext():
                    ended_by, exit_code = self._measure_and_train(stop)
            finally:
                self._metrics.close()
                self._loader.close()
                self.store.close()
            if machines.is_first:
                draw_pictures(folder.path)
            if bad := self._loader.num_bad_records():
                say(f"bad records skipped: {bad}")
            if long := self._loader.num_long_documents():
                handled = self.config.data.long_documents
                say(f"documents longer than a sequence: {long} (long_documents = {handled})")
            if exit_code == 0 and machines.is_first and self._meter.mean_tokens_per_s():
                say(parts.closing_text(self._meter))
            saved = self._checkpoints.saved_step
            say(f"{folder.path}: saved after step {saved} of {self._total_steps}; {ended_by}")
        return exit_code

    def _initialize(self) -> None:
        """Fill the store for a new run: from a checkpoint's weights, a pretrained model, or the seed."""
        seed, model, config = self.config.run.seed, self._parts.model, self.config
        pretrained = self._checkpoints.starting_weights(self.store) or self._parts.pretrained
        if pretrained is None:
            say(f"{self._folder.path}: a new run; initialising weights from seed {seed}")
        else:
            say(f"{self._folder.path}: a new run; reading its weights from {pretrained.folder}")
        if pretrained is None and config.lora.rank:
            logger.warning(
                "lora.rank = %d: the frozen weights below the adapters are random, so there is little to learn; give "
                "the folder of a released or exported model (model.hf_path)",
                config.lora.rank,
            )
        if (lr := config.optimizer.lr) > HIGH_LR:
            logger.warning("optimizer.lr = %g is far above what trains a model: usual are 1e-5 to 1e-2", lr)
        progress = Progress("initialising layers", len(model.layers))
        self.store.initialize(model, seed, None if pretrained is None else pretrained.load, progress.advance)

    def _measure_and_train(self, stop: StopRequest) -> tuple[str, int]:
        """Train the steps that measure, settle the plan, train the others.

        Returns why the run ended, and the exit code that says so.
        """
        parts, total_steps, machines = self._parts, self._total_steps, self._machines
        kept = self._folder.kept_plan() if self._position.step else None
        measure_steps = self.config.engine.measure_steps
        planning = PlanByMeasuring(
            parts.question, parts.plan, kept, self._position.step, measure_steps, total_steps
        )
        # All measure if one has to: the machines report the same steps at the same time.
        if not all(machines.agree("start", planning.is_kept, "whether plans are kept")):
            planning.measure()
        say(planning.text())
        self._folder.describe(self.config, planning.settled)
        self._meter = parts.step_meter(self._devices, self._checkpoints.skipped_steps)
        waiting = self._meter.waiting_for_data
        micro_batch_size, rounds = self.config.training.micro_batch_size, planning.settled.rounds
        self._batches = machines.step_batches(self._loader, micro_batch_size, rounds, waiting)
        self._reports = StepReports(
            *(self._meter, self._metrics, self._traces, self._bad_steps, self._checkpoints, machines),
            log_every_steps=self.config.metrics.log_every_steps,
            last_step=total_steps,
        )
        self._meter.start()
        if self._position.step < planning.until:
            end = self._train_measured(planning, stop)
            if end is not None or planning.until == total_steps:
                return end or COMPLETE
            # The first engine has ended: its steps are done, and its devices are empty for the engine of the next plan.
            with self._meter.excluded():
                planning.settle()
            say(
                f"planned again from {measure_steps} measured steps:\n{planning.settled}{planning.ratio_text}"
            )
            try:
                self._folder.describe(self.config, planning.settled)
            except RunError as error:  # a full disk must not cost steps; losses do not depend on the plan
                logger.warning("%s; training continues, and a resumed run has the plan before it", error)
        with self._running_engine(planning.settled) as engine:
            return self._train(engine, stop, total_steps) or COMPLETE

    def _train_measured(self, planning: PlanByMeasuring, stop: StopRequest) -> tuple[str, int] | None:
        """Run the steps that measure, on an engine of their own. Returns as `_train` does."""
        # A function of its own, so that no name refers to this engine while the next one runs.
        with self._running_engine(planning.settled, times_layers=True) as engine:
            return self._train(engine, stop, planning.until, measured_by=planning)

    @contextmanager
    def _running_engine(self, plan: Plan, times_layers: bool = False) -> Iterator[Engine]:
        """Run an engine for the block. After a fault, save the state that it left."""
        parts, machines = self._parts, self._machines.group
        with self._meter.excluded():
            engine = build_engine(
                *(parts.model, self.store, self._devices, plan, parts.numbers, self.config.optimizer),
                compiler=self._compiler,
                times_layers=times_layers,
                machines=machines,
            )
        try:
            try:
                with engine:
                    reserve_buffers(engine, self.config.training, self._validation.is_on)
                    self._traces.start()
                    try:
                        yield engine
                    except DataError:
                        if machines is not None:
                            # All machines have the error. They end their saves together, while all engines run.
                            self._reports.report(leave=0)
                            self._checkpoints.finish_saves()
                        raise
            finally:
                self._traces.finish()
        except CheckpointError:
            raise  # saving failed, so saving again would too
        except Exception as error:
            # The saves first: they read the store that the rescue saves.
            self._checkpoints.end_saves()
            self._reports.report_finished(self.store.step)
            self._checkpoints.rescue(self.store, error)
            raise

    # The loop.

    def _train(
        self, engine: Engine, stop: StopRequest, until: int, measured_by: PlanByMeasuring | None = None
    ) -> tuple[str, int] | None:
        """Run the loop up to step `until`. If it ends before, return why, and the exit code that says so."""
        end, save_every = None, self.config.checkpoint.interval_steps
        while self._position.step < until and self._bad_steps.error is None:
            stop.poll()
            if (end := self._reason_to_stop(stop)) is not None:
                break
            batch = self._next_batch(engine, stop)
            # Other machines' signals come with the batch, which a resumed run reads again.
            if (end := self._reason_to_stop(stop)) is not None:
                break
            if batch is None:
                end = "the data has come to its end; without training.steps the learning rate ends with it", 0
                break
            result = self._dispatch(engine, batch)
            if measured_by is not None:
                measured_by.add(result)
            # One step stays under way, so that the devices compute while the step before it is reported.
            self._reports.report(leave=1)
            # The last step too: it may be due to be saved, and its checkpoint should know its validation.
            step = self._position.step
            if self._validation.is_due(step, self._total_steps):
                self._validate(engine)
            is_due = save_every > 0 and step % save_every == 0
            if is_due or self._validation.keeps(self._position.validation, step):
                self._checkpoints.begin_save(engine)
        # The end of the measuring steps is not the end of the run, so it needs no validation and no checkpoint.
        self._finish(engine, end is not None or until == self._total_steps, bool(end and end[1]))
        return end

    def _finish(self, engine: Engine, is_over: bool, is_stopped: bool) -> None:
        """Report all steps. At the end of the run also validate, unless a signal stopped it, and save.

        Raises `BadStepsError` or `CheckpointError`, the former after saving.
        """
        bad = self._bad_steps.error
        may_validate = is_over and not is_stopped and bad is None
        if may_validate and self._validation.is_on and not self._reports.are_complete:
            self._validate(engine)
        self._reports.report(leave=0)
        self._checkpoints.finish_saves()
        bad = self._bad_steps.error  # a step that was reported just now may be one too many
        if is_over or bad is not None:
            self._reports.log_rest()
            engine.drain()  # the step under way counts as training time
            with self._meter.excluded():
                self._checkpoints.save_now(engine)
        if bad is not None:
            raise bad

    def _reason_to_stop(self, stop: StopRequest) -> tuple[str, int] | None:
        """Return why the run ends before its next step, and the exit code that says so; None if it continues."""
        if (text := stop.text()) is not None:
            return text, stop.exit_code
        progress = self._position.validation
        early = progress.stop_reason(self.config.validation.patience) if progress else None
        return None if early is None else (early, 0)

    @property
    def _position(self) -> RunPosition:
        """The run's position after the newest step that was dispatched."""
        return self._checkpoints.position

    def _next_batch(self, engine: Engine, stop: StopRequest) -> StepBatch | None:
        """Return this machine's part of the next batch, None at the end of the data. Takes the signals of all machines."""
        try:
            batch, signals = self._batches.next(stop.signal_number)
        except DataError:
            # The fault is in the next batch. The steps before it are finished here, and saved on the way out.
            self._reports.report(leave=0)
            engine.drain()
            raise
        stop.set_signals(signals)
        return batch

    def _dispatch(self, engine: Engine, batch: StepBatch) -> StepResult:
        """Give a step and its update to the engine, and note the run's position after it. Does not wait."""
        step = self._position.step  # finished steps, which is the index of this one
        lr = self._schedule(step)
        self._traces.before_dispatch(step + 1)
        micro_batches = batch.with_seeds(self.config.run.seed, step)
        result = engine.forward_backward(micro_batches, batch.share, batch.num_labels)
        engine.step(lr)
        tokens = self._position.tokens + result.num_labels
        # Taken now, before the next batch is drawn: a resumed run must begin with that batch.
        validation = self._position.validation and replace(self._position.validation, loss=None)
        position = RunPosition(step + 1, tokens, self._loader.state_dict(), validation)
        self._checkpoints.positions.append(position)
        self._reports.add(Dispatched(result, position, lr, batch.num_tokens))
        return result

    def _validate(self, engine: Engine) -> None:
        """Validate the fp32 weights of the newest step, and report it with the loss. No step stays under way."""
        engine.drain()  # the step under way counts as training time
        with self._meter.excluded(), engine.true_device_weights():
            loss = self._validation.loss(engine)
            samples = self._parts.samples.made_by(engine, self._machines)
        if loss is not None:
            self._checkpoints.add_validation(loss)
        self._reports.report(leave=0, validated=Validated(loss, samples))

"""The training loop: what happens in a run, in time order."""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torchround.accelerators import accumulating_in_fp16, kind_of
from torchround.checkpoint import CheckpointError, verify_checkpoint
from torchround.config import Config, EngineTable
from torchround.data import DataError
from torchround.data.loader import Loader, ValidationLoader
from torchround.data.step_batches import StepBatch, StepBatches
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import Device
from torchround.engine.engine import Engine
from torchround.engine.exchange import share_weights
from torchround.engine.passes import StepResult
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_store import HostStore
from torchround.engine.tracing import StepTraces
from torchround.hf import PretrainedWeights
from torchround.layer import FileTensor, LayeredModel
from torchround.machines.group import MachineGroup
from torchround.observe.console import duration
from torchround.observe.logger import MetricsLogger, open_metrics
from torchround.observe.record import PromptSample
from torchround.observe.run_page import PAGE_FILE, draw_pictures
from torchround.optim import LRSchedule, SpikeBounds
from torchround.optim.optimizer import make_optimizer
from torchround.planning.memory import size_text
from torchround.planning.plan import Plan
from torchround.planning.run_question import RunQuestion
from torchround.planning.update_modes import STEPS_UNDER_WAY, mode_of
from torchround.run.checkpoints import RunCheckpoints, RunPosition
from torchround.run.early_end import BadSteps, StopRequest
from torchround.run.hardware import Hardware
from torchround.run.numbers import DTYPES, compiles_layers, measured_plan
from torchround.run.packed_base import PackedBase
from torchround.run.run_folder import RunError, RunFolder, require_room
from torchround.run.several_machines import RunMachines
from torchround.run.step_meter import StepMeter, flops_per_token
from torchround.run.validation import RunValidation
from torchround.untrusted.terminal import Progress, say

logger = logging.getLogger(__name__)

# From this size on `engine.compile = "auto"` compiles the update. Compiling takes about 1 s and then saves at least 2 ns per
# parameter and step on two cores, so that at this size it pays for itself in some 250 steps.
COMPILE_FROM_PARAMETERS = 2**21
# How a run ends that trains its last step: why, for the console, and the exit code.
COMPLETE = "the run is complete", 0
DATA_ENDED = "the data has come to its end; without training.steps the learning rate ends with it"


@dataclass(frozen=True)
class RunParts:
    """All that a trainer needs, checked against each other; nothing large is allocated yet.

    `loader` is at the start of the data. `plan` is the answer to `question`. `mapped` are the frozen weights that stay in
    their files, by parameter name. `packed_base` fills packed ones. `machines` are those of the run, this one among them.
    """

    config: Config
    folder: RunFolder
    model: LayeredModel
    loader: Loader
    validation: RunValidation
    hardware: Hardware
    question: RunQuestion
    plan: Plan
    pretrained: PretrainedWeights | None
    mapped: Mapping[str, Sequence[FileTensor]]
    machines: RunMachines
    packed_base: PackedBase | None = None

    def identity(self) -> dict[str, str]:
        """Return what must be the same on all machines besides the configuration, by names for messages."""
        found = self.loader.fingerprints()
        if isinstance(self.validation.batches, ValidationLoader):
            found |= self.validation.batches.fingerprints()
        if self.pretrained is not None:
            found["pretrained weights"] = self.pretrained.fingerprint()
        if self.packed_base is not None:  # other weights, if the run begins with those of a checkpoint
            found["packed base"] = self.packed_base.weights.fingerprint()
        return found

    def step_meter(self, devices: Sequence[Device], skipped_steps: int) -> StepMeter:
        """Make the meter of the run's steps. All machines make theirs at the same time."""
        training, spec = self.config.training, self.hardware.spec
        peak = None if spec is None else spec.flops_per_s(training.dtype, training.fp16_accumulation)
        peaks = self.machines.agree("start", [peak, len(devices)], "the devices of all machines")
        if any(each is None for each, _ in peaks):  # nothing asks for FLOPs, which are slow to count
            return StepMeter(devices, 0.0, None, skipped_steps)
        counted = flops_per_token(self.model, training.seq_len, DTYPES[training.dtype].itemsize)
        return StepMeter(devices, counted, float(sum(each * count for each, count in peaks)), skipped_steps)


@dataclass(frozen=True)
class Dispatched:
    """A step under way, and the run's position after it. `num_tokens` counts the tokens of its batch without padding."""

    result: StepResult
    position: RunPosition
    lr: float
    num_tokens: int


class Trainer:
    """One run, from its start or newest checkpoint. The constructor does no work: `run` makes all in time order."""

    def __init__(self, parts: RunParts) -> None:
        config = parts.config
        self.config = config
        self._parts = parts
        self._checkpoints = RunCheckpoints(config, parts.folder)
        self._total_steps = config.training.num_steps
        self._schedule = LRSchedule(config.lr_schedule, config.optimizer.lr, self._total_steps)
        self._bad_steps = BadSteps(config.training)
        self._metrics = MetricsLogger({})
        # The dispatched steps that are not reported yet, and the newest one that is.
        self._under_way: deque[Dispatched] = deque()
        self._reported: Dispatched | None = None
        self._is_faulty = False

    def run(self) -> int:
        """Train to the end, or until a signal. Returns the exit code of the process.

        Raises `RunError` or one of the run's faults (`FAULTS` in `train_model.py`), after saving what can be saved.
        """
        parts, folder, machines = self._parts, self._parts.folder, self._parts.machines
        if (newest := self._checkpoints.complete_step()) is not None:
            advice = "nothing to do (raise training.steps or data.epochs to continue)"
            say(f"{folder.path}: the run is complete after {newest} steps; {advice}")
            return 0
        what = "whether checkpoints have room"
        machines.same_mistakes(lambda: require_room(folder, parts.question), (RunError,), what)
        config, mapped = self.config, dict(parts.mapped)
        if parts.packed_base is not None and config.lora.map_base:
            mapped |= parts.packed_base.map(DTYPES[config.training.dtype], make_optimizer(config.optimizer))
        ownership = Ownership(machines.rank, machines.size)
        self.store = build_store(parts.model, config, parts.hardware, mapped, ownership)
        # One compiler for all engines of the run: the one that measures and the one after it run the same layers.
        kind, stays_uncompiled = parts.hardware.kind, parts.question.stays_uncompiled
        self._compiler = layer_compiler(parts.model, config.engine, kind, stays_uncompiled)
        self._devices = parts.hardware.make_devices()
        self._traces = StepTraces(config.trace, folder.path / "trace", self._devices, self._total_steps)
        if parts.packed_base is not None:
            parts.packed_base.fill(self.store)
        if not self._checkpoints.restore(self.store, self._parts.loader):
            self._initialize()
        if machines.group is not None:  # each machine has filled what it owns
            share_weights(self.store, machines.group)
        run_id = self._checkpoints.wandb_run_id
        self._metrics = MetricsLogger({}, run_id)
        if machines.is_first:
            self._metrics = open_metrics(
                config.metrics,
                folder.path,
                config.run.name,
                self._total_steps,
                config.model_dump(mode="json"),
                resumed_step=self._position.step,
                wandb_run_id=run_id,
            )
        self._checkpoints.wandb_run_id = self._metrics.wandb_run_id
        # Signals are caught up to the last line: closing may take seconds, and a saved run must not end as a killed one.
        with StopRequest(machines.names) as stop:
            try:
                with accumulating_in_fp16(config.training.fp16_accumulation):
                    ended_by, exit_code = self._measure_and_train(stop)
            finally:
                self._metrics.close()
                self._parts.loader.close()
                self.store.close()
            if machines.is_first:
                draw_pictures(folder.path)
            if bad := self._parts.loader.num_bad_records():
                say(f"bad records skipped: {bad}")
            if long := self._parts.loader.num_long_documents():
                handled = f"long_documents = {config.data.long_documents}"
                say(f"documents longer than a sequence: {long} ({handled})")
            if exit_code == 0 and machines.is_first and self._meter.mean_tokens_per_s():
                rate = f"{self._meter.mean_tokens_per_s():,.0f} tokens/s on average"
                say(f"time     {duration(self._meter.elapsed_s)}, {rate}; see {folder.path / PAGE_FILE}")
            saved = self._checkpoints.saved_step
            say(f"{folder.path}: saved after step {saved} of {self._total_steps}; {ended_by}")
        return exit_code

    def _initialize(self) -> None:
        """Fill the store for a new run: from a checkpoint's weights, a pretrained model, or the seed."""
        seed, model, begins_with = self.config.run.seed, self._parts.model, self._parts.pretrained
        if begins_with is not None:
            say(f"{self._parts.folder.path}: a new run; reading its weights from {begins_with.folder}")
            if self.config.checkpoint.load == "weights":
                verify_checkpoint(begins_with.folder, Progress("verifying them", text=size_text).advance)
        else:
            say(f"{self._parts.folder.path}: a new run; initialising weights from seed {seed}")
            if self.config.lora.rank:
                text = "the frozen weights below the adapters are random, so there is little to learn; give the folder"
                logger.warning("lora.rank: %s of a released or exported model (model.hf_path)", text)
        progress = Progress("initialising layers", len(model.layers))
        read = None if begins_with is None else partial(begins_with.load, skipped=model.packed.keys())
        self.store.initialize(model, seed, read, progress.advance)

    def _measure_and_train(self, stop: StopRequest) -> tuple[str, int]:
        """Train the steps that measure, plan again, train the others. Returns why the run ended, and the exit code."""
        parts, first, total_steps = self._parts, self._position.step, self._total_steps
        plan, machines = parts.plan, parts.machines
        measure_steps = self.config.engine.measure_steps if parts.question.given is None else 0
        until = min(first + measure_steps, total_steps)
        # A card of unknown speed gets no times.
        is_timed = parts.question.device is not None
        purpose = f" for {until - first} steps, which time each layer for the next plan" * (until > first)
        say(f"plan     of {len(plan.stages)} stages{purpose}\n{plan.text(is_timed)}")
        self._parts.folder.describe(self.config, plan)
        self._meter = parts.step_meter(self._devices, self._checkpoints.skipped_steps)
        agree = partial(machines.agree, "batches", what="the batch of the next step")
        self._batches = StepBatches(
            self._parts.loader,
            self.config.training.micro_batch_size,
            plan.rounds,
            agree if machines.group else None,
            machines.rank,
            machines.size,
            names=machines.names,
            reading=partial(self._meter.timed, "data"),
        )
        self._meter.start()
        if first < until:
            measured: list[StepResult] = []
            with self._running_engine(plan, times_layers=True) as engine:
                end = self._train(engine, stop, until, measured)
            del engine  # no name may refer to it while the next one runs
            if end is not None or until == total_steps:
                return end or COMPLETE
            # The first engine has ended: its steps are done, and its devices are empty for the engine of the next plan.
            with self._meter.timed("excluded"):
                plan = measured_plan(parts.question, plan, measured)
            measured.clear()  # the results hold the marks of an engine that has ended
            say(f"planned again from {measure_steps} measured steps:\n{plan}")
            try:
                self._parts.folder.describe(self.config, plan)
            except RunError as error:  # a full disk must not cost steps; losses do not depend on the plan
                logger.warning("%s; plan.json keeps the plan before", error)
        with self._running_engine(plan) as engine:
            return self._train(engine, stop, total_steps) or COMPLETE

    @contextmanager
    def _running_engine(self, plan: Plan, times_layers: bool = False) -> Iterator[Engine]:
        """Run an engine for the block. After a fault, save the state that it left."""
        model, group = self._parts.model, self._parts.machines.group
        with self._meter.timed("excluded"):
            engine = build_engine(
                model, self.store, self._devices, plan, self.config, self._compiler, times_layers, group
            )
        try:
            try:
                with engine:
                    try:
                        yield engine
                    except DataError:
                        if group is not None:
                            # All machines have the error. They end their saves together, while all engines run.
                            self._report(leave=0)
                            self._checkpoints.report_saves()
                        raise
            finally:
                self._traces.finish()
        except CheckpointError:
            raise  # saving failed, so saving again would too
        except Exception as error:
            # The saves first: they read the store that the rescue saves.
            self._checkpoints.abandon_saves()
            # Then the steps up to the newest update, as far as figures exist.
            self._is_faulty = True
            try:
                self._report(leave=sum(step.position.step > self.store.step for step in self._under_way))
                self._log()
            except Exception as lost:  # noqa: BLE001  (`error` is raised; a device that failed may give no figures)
                logger.warning("the last steps are missing in the metrics: %s", lost)
            self._checkpoints.rescue(self.store, error)
            raise

    # The loop.

    def _train(
        self, engine: Engine, stop: StopRequest, until: int, measured: list[StepResult] | None = None
    ) -> tuple[str, int] | None:
        """Run the loop up to step `until`. If it ends before, return why, and the exit code that says so."""
        end, save_every = None, self.config.checkpoint.interval_steps
        while self._position.step < until and self._bad_steps.error is None:
            # The signals of all machines come in place of the batch; a resumed run reads it.
            try:
                batch, stop.signals = self._batches.next(lambda: stop.signal_number)
            except DataError:
                # The fault is in the next batch. The steps before it are finished here, and saved on the way out.
                self._report(leave=0)
                engine.drain()
                raise
            progress = self._position.validation
            early = progress.stop_reason(self.config.validation.patience) if progress else None
            if batch is None:
                early = early or DATA_ENDED
            end = stop.reason() or ((early, 0) if early else None)
            if batch is None or end is not None:
                break
            result = self._dispatch(engine, batch)
            if measured is not None:
                measured.append(result)
            # One step stays under way, so that the devices compute while the step before it is reported.
            self._report(leave=STEPS_UNDER_WAY - 1)
            # The last step too: it may be due to be saved, and its checkpoint should know its validation.
            step = self._position.step
            if self._parts.validation.is_due(step, self._total_steps):
                self._validate(engine)
            is_due = save_every > 0 and step % save_every == 0
            if is_due or self._parts.validation.keeps(self._position.validation, step):
                self._checkpoints.begin_save(engine)
        # The end of the measuring steps is not the end of the run, so it needs no validation and no checkpoint.
        self._finish(engine, end is not None or until == self._total_steps, bool(end and end[1]))
        return end

    def _finish(self, engine: Engine, is_over: bool, is_stopped: bool) -> None:
        """Report all steps. At the end of the run also validate, unless a signal stopped it, and save.

        Raises `BadStepsError` or `CheckpointError`, the former after saving.
        """
        may_validate = is_over and not is_stopped and self._bad_steps.error is None
        if may_validate and self.config.validation.interval_steps and self._under_way:
            self._validate(engine)
        self._report(leave=0)
        self._checkpoints.report_saves()
        bad = self._bad_steps.error  # a step that was reported just now may be one too many
        if is_over or bad is not None:
            self._log()
            engine.drain()  # the step under way counts as training time
            with self._meter.timed("excluded"):
                self._checkpoints.save_now(engine)
        if bad is not None:
            raise bad

    @property
    def _position(self) -> RunPosition:
        return self._checkpoints.position

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
        position = RunPosition(step + 1, tokens, self._parts.loader.state_dict(), validation)
        self._checkpoints.positions.append(position)
        self._under_way.append(Dispatched(result, position, lr, batch.num_tokens))
        return result

    def _validate(self, engine: Engine) -> None:
        """Validate the fp32 weights of the newest step, and report it with the loss. No step stays under way."""
        engine.drain()  # the step under way counts as training time
        with self._meter.timed("excluded"), engine.true_device_weights():
            loss = self._parts.validation.loss(engine)
            samples = self._parts.validation.samples(engine)
        if loss is not None:
            self._checkpoints.add_validation(loss)
        self._report(leave=0, loss=loss, samples=samples)

    # What is known of a step is reported once it is done: the devices compute the next one meanwhile.

    def _report(self, leave: int, loss: float | None = None, samples: Sequence[PromptSample] = ()) -> None:
        """Wait for all but the newest `leave` steps, and log those that are due, the newest with `loss` and `samples`."""
        while len(self._under_way) > leave:
            done = self._under_way[0]
            step = done.position.step
            self._meter.add(done.result, done.num_tokens)
            self._traces.add(done.result)
            self._bad_steps.add(step, done.position.tokens - done.result.num_labels, done.result)
            self._reported = done
            is_due = step % self.config.metrics.log_every_steps == 0 or step == self._total_steps
            if len(self._under_way) == 1 and (loss is not None or samples):
                self._log(loss, samples)
            elif is_due:
                self._log()
            # Only now: a step whose report fails stays under way, and is named when the run ends.
            self._under_way.popleft()
            self._checkpoints.reported(step)

    def _log(self, loss: float | None = None, samples: Sequence[PromptSample] = ()) -> None:
        """Log the steps that were reported since the last record, as the record of the newest. Does nothing without any."""
        done = self._reported
        if done is not None and self._meter.num_steps:
            record = self._meter.record(done.position.step, done.position.tokens, done.lr, loss)
            record = replace(record, samples=tuple(samples))
            # After a fault the other machines answer no more.
            self._metrics.log(record if self._is_faulty else self._parts.machines.merged(record))


# The host store and the engine of a run.


def build_store(
    model: LayeredModel,
    config: Config,
    hardware: Hardware,
    mapped: Mapping[str, Sequence[FileTensor]] | None = None,
    ownership: Ownership | None = None,
) -> HostStore:
    # With an optimizer that cannot predict, nothing corrects the delay.
    predicts = config.engine.delay_correction != "none" and config.optimizer.can_predict
    store = HostStore(
        model,
        DTYPES[config.training.dtype],
        mode=mode_of(config.engine.update).with_prediction(predicts),
        # Devices copy asynchronously only from and to locked memory.
        pinned=kind_of(hardware.kind).locks_pages,
        mapped=mapped,
        ownership=ownership,
        optimizer=make_optimizer(config.optimizer),
    )
    # Deviations from the median above which a step is a spike; 0 finds none.
    store.spikes = SpikeBounds(0.0 if config.training.on_spike == "off" else 10.0)
    return store


def build_engine(
    model: LayeredModel,
    store: HostStore,
    devices: Sequence[Device],
    plan: Plan,
    config: Config,
    compiler: LayerCompiler | None = None,
    times_layers: bool = False,
    machines: MachineGroup | None = None,
) -> Engine:
    """Start an engine that runs `plan`. `compiler` may hold layers that an earlier engine of the model compiled."""
    table = config.engine
    settings = EngineSettings(
        rounds=plan.rounds,
        max_norm=config.training.max_norm,
        clip=config.training.clip,
        stale_layers=plan.stale_layers,
        layerwise_recompute=table.recompute == "layer",
        times_layers=times_layers,
        accumulate_dtype=DTYPES[table.accumulate_dtype],
        hang_timeout_s=table.hang_timeout_s,
        compile_update=compiles_update(table, store),
        compiler=compiler,
        kept=plan.kept,
        experts_by_need=config.lora.experts_by_need,
    )
    return Engine(
        *(model, store, devices, plan.partition),
        optimizer=config.optimizer,
        settings=settings,
        machines=machines,
    )


def compiles_update(table: EngineTable, store: HostStore) -> bool:
    if table.compile == "auto":
        return sum(bundle.numel for bundle in store.trained) >= COMPILE_FROM_PARAMETERS
    return table.compile


def layer_compiler(
    model: LayeredModel, table: EngineTable, kind: str, stays_uncompiled: bool = False
) -> LayerCompiler | None:
    if stays_uncompiled or not compiles_layers(table, kind):
        return None
    return LayerCompiler(model, options=table.compile_options)

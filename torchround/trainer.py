"""The training loop: what happens in a run, in time order.

A step is dispatched before the one before it is reported, so that reporting never keeps the devices waiting.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchround.checkpoint import Checkpointer, CheckpointError, Loaded, load_checkpoint
from torchround.config import Config, to_toml
from torchround.data import DataError, Tokenizer, build_loader, build_validation_loader, cut
from torchround.engine.build import DTYPES, DeviceChoice, build_engine, build_store
from torchround.engine.device import GIB
from torchround.engine.engine import Engine
from torchround.engine.errors import PipelineError
from torchround.engine.results import StepResult
from torchround.layer import LayeredModel, MicroBatch
from torchround.observe import (
    MetricsLogger,
    StepRecord,
    Throughput,
    host_gib,
    mfu,
    open_metrics,
    train_flops_per_token,
)
from torchround.optim import LRSchedule
from torchround.pipeline.plan import Plan
from torchround.signals import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a run is after `step` steps; with the host store's state, enough to go on from there."""

    step: int
    tokens: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Dispatched:
    """A step under way: its result to come, and where the run is after it."""

    result: StepResult
    position: Position
    lr: float


class Trainer:
    """One run in its folder `<run.folder>/<run.name>`, from its start or from its newest checkpoint.

    Raises `CheckpointError`, `DataError` or `PipelineError`; whatever could be saved is saved before.
    """

    def __init__(
        self, config: Config, model: LayeredModel, tokenizer: Tokenizer, devices: DeviceChoice, plan: Plan
    ) -> None:
        self.config = config
        self.folder = Path(config.run.folder) / config.run.name
        self._model = model
        self._choice = devices
        self._devices = devices.make()
        self._plan = plan
        training = config.training
        self._loader = build_loader(
            config.data, tokenizer, training.seq_len, training.global_batch_size, config.run.seed
        )
        self._validation: Iterable[MicroBatch] = ()
        if config.validation.interval_steps > 0:
            self._validation = build_validation_loader(
                config.validation, tokenizer, training.seq_len, training.global_batch_size
            )
        self._checkpointer = Checkpointer(self.folder / "checkpoints", config.checkpoint.keep_latest_k)
        self._schedule = LRSchedule(config.lr_schedule, config.optimizer.lr, training.steps)
        self._store = build_store(model, training, config.engine, devices)
        self._throughput = Throughput()
        self._metrics = MetricsLogger({})
        self._under_way: deque[Dispatched] = deque()
        # Where the run was after the newest steps: a fault leaves the host store at one of them.
        self._positions: deque[Position] = deque(maxlen=4)
        self._skipped_steps = 0
        self._busy_s = 0.0
        self._optimizer_s = 0.0
        self._saved_step = -1

    def run(self) -> int:
        """Train to the end, or until a signal. Returns the exit code of the process."""
        state = self._restore_or_initialize()
        if self._position.step >= self.config.training.steps:
            print(f"{self.folder}: the run is complete after {self._position.step} steps; nothing to do")
            return 0
        self._describe_run()
        self._metrics = open_metrics(
            self.config.metrics,
            self.folder,
            self.config.run.name,
            self.config.training.steps,
            self.config.model_dump(mode="json"),
            resumed_step=self._position.step,
            wandb_run_id=state.get("wandb_run_id"),
        )
        try:
            with StopRequest() as stop, self._running_engine() as engine:
                ended_by = self._train(engine, stop)
        finally:
            self._metrics.close()
        print(
            f"{self.folder}: saved after step {self._saved_step} of {self.config.training.steps}; {ended_by}"
        )
        return stop.exit_code

    def _train(self, engine: Engine, stop: StopRequest) -> str:
        """The loop. Returns why it ended."""
        ended_by = "the run is complete"
        self._throughput = Throughput()
        while self._position.step < self.config.training.steps:
            batch = self._next_batch(engine)
            if batch is None:
                ended_by = "the data has come to its end"
                break
            self._dispatch(engine, batch)
            self._report_steps(engine, leave=1)
            if self._is_due(self.config.validation.interval_steps):
                self._report_steps(engine, leave=0, validation_loss=self._validate(engine))
            if self._is_due(self.config.checkpoint.interval_steps):
                self._save(engine, last=False)
            if stop.requested:
                ended_by = f"stopped by signal {stop.signal_number}; run the same command to go on"
                break
        self._save(engine, last=True)
        return ended_by

    # One step.

    @property
    def _position(self) -> Position:
        return self._positions[-1]

    def _next_batch(self, engine: Engine) -> MicroBatch | None:
        """The next batch, None at the end of the data. A record at fault ends the run, after a save."""
        try:
            with self._throughput.waiting_for_data():
                return next(self._loader, None)
        except DataError:
            self._save(engine, last=True)
            raise

    def _dispatch(self, engine: Engine, batch: MicroBatch) -> None:
        lr = self._schedule(self._position.step)
        result = engine.forward_backward(cut(batch, self.config.training.micro_batch_size))
        engine.step(lr)
        position = Position(
            self._position.step + 1, self._position.tokens + result.num_labels, self._loader.state_dict()
        )
        self._positions.append(position)
        self._under_way.append(Dispatched(result, position, lr))

    def _report_steps(self, engine: Engine, leave: int, validation_loss: float | None = None) -> None:
        """Wait for all but the newest `leave` steps, and log those that are due."""
        while len(self._under_way) > leave:
            done = self._under_way.popleft()
            update = done.result.update()
            self._throughput.count(done.result.num_labels)
            self._skipped_steps += update.skipped
            self._optimizer_s += update.seconds
            self._busy_s += sum(times.busy_s for times in done.result.device_times(len(self._devices)))
            if update.skipped:
                logger.warning(
                    "step %d: the gradient is not finite; its update is skipped", done.position.step
                )
            if self._should_log(done.position.step) or validation_loss is not None:
                self._metrics.log(self._record(done, update.grad_norm, validation_loss))

    def _record(self, done: Dispatched, grad_norm: float, validation_loss: float | None) -> StepRecord:
        interval = self._throughput.report()
        devices_s = len(self._devices) * interval.step_s * interval.num_steps
        record = StepRecord(
            step=done.position.step,
            loss=done.result.loss(),
            grad_norm=grad_norm,
            lr=done.lr,
            tokens=done.position.tokens,
            tokens_per_s=interval.tokens_per_s,
            mfu=self._mfu(interval.tokens_per_s),
            step_s=interval.step_s,
            data_s=interval.data_s,
            optimizer_s=self._optimizer_s / interval.num_steps,
            bubble=1 - self._busy_s / devices_s if devices_s > 0 else None,
            device_peak_gib=max(device.peak_bytes() for device in self._devices) / GIB,
            host_gib=host_gib(),
            skipped_steps=self._skipped_steps,
            validation_loss=validation_loss,
        )
        self._busy_s = self._optimizer_s = 0.0
        return record

    def _mfu(self, tokens_per_s: float) -> float | None:
        training, spec = self.config.training, self._choice.spec
        if spec is None:
            return None
        element_bytes = DTYPES[training.dtype].itemsize
        forward_flops = sum(
            layer.work(1, training.seq_len, element_bytes).forward_flops  # type: ignore[operator]
            for layer in self._model.layers
        )
        per_token = train_flops_per_token(forward_flops, training.seq_len)
        return mfu(tokens_per_s, per_token, spec.peak_flops.get(training.dtype), len(self._devices))

    def _validate(self, engine: Engine) -> float:
        """Mean loss per label over the validation batches, under the newest weights."""
        loss_sum, num_labels = 0.0, 0
        with self._throughput.excluded():
            for batch in self._validation:
                result = engine.evaluate(cut(batch, self.config.training.micro_batch_size))
                loss_sum += result.loss() * result.num_labels
                num_labels += result.num_labels
        return loss_sum / max(num_labels, 1)

    def _is_due(self, interval_steps: int) -> bool:
        return interval_steps > 0 and self._position.step % interval_steps == 0

    def _should_log(self, step: int) -> bool:
        return step % self.config.metrics.log_every_steps == 0 or step == self.config.training.steps

    # Start, checkpoints, end.

    def _restore_or_initialize(self) -> dict[str, Any]:
        """Fill the host store and find the position. Returns the checkpoint's state, empty at a start."""
        loaded = self._load()
        if loaded is None:
            print(
                f"initialising {self._store.num_parameters():,} parameters from seed {self.config.run.seed}"
            )
            self._store.initialize(self._model, self.config.run.seed)
            self._positions.append(Position(0, 0, self._loader.state_dict()))
            return {}
        state = loaded.state
        self._store.resume(loaded.step, state["applied_updates"])
        self._loader.load_state_dict(state["data"])
        self._skipped_steps = state["skipped_steps"]
        self._positions.append(Position(loaded.step, state["tokens"], state["data"]))
        self._saved_step = loaded.step
        print(f"going on after step {loaded.step} from {loaded.path}")
        return state

    def _load(self) -> Loaded | None:
        views = self._store.named_views()
        loaded = self._checkpointer.load_latest(views)
        if loaded is None and self.config.checkpoint.load_path is not None:
            loaded = load_checkpoint(self.config.checkpoint.load_path, views)
        return loaded

    def _describe_run(self) -> None:
        """Leave the resolved config and the plan in the run's folder, and the plan on the console."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(to_toml(self.config))
        (self.folder / "plan.json").write_text(self._plan.to_json())
        print(self._plan)

    @contextmanager
    def _running_engine(self) -> Iterator[Engine]:
        """An engine for the block. The state that a fault in the pipeline leaves is saved."""
        config = self.config
        engine = build_engine(
            self._model,
            self._store,
            self._devices,
            self._plan,
            config.engine,
            config.optimizer,
            config.training.max_norm,
        )
        try:
            with engine:
                yield engine
        except PipelineError:
            self._rescue()
            raise

    def _rescue(self) -> None:
        """Save the state that a fault left, unless it mixes two weight versions or is saved already."""
        position = next((p for p in self._positions if p.step == self._store.step), None)
        if position is None or not self._store.is_consistent or position.step == self._saved_step:
            return
        try:
            self._write_checkpoint(position)
        except CheckpointError as error:
            logger.warning("%s", error)

    def _save(self, engine: Engine, last: bool) -> None:
        """Save where the run is now. Only the last save of a run may not fail; others are made up for later."""
        self._report_steps(engine, leave=0)
        engine.drain()
        if self._position.step == self._saved_step:
            return
        try:
            with self._throughput.excluded():
                self._write_checkpoint(self._position)
        except CheckpointError as error:
            if last:
                raise
            logger.warning("%s; training goes on", error)

    def _write_checkpoint(self, position: Position) -> None:
        state = {
            **asdict(position),
            "applied_updates": self._store.applied_updates,
            "skipped_steps": position.step - self._store.applied_updates,
            "wandb_run_id": self._metrics.wandb_run_id,
            "config": self.config.model_dump(mode="json"),
        }
        self._checkpointer.save(position.step, self._store.named_views(), state)
        self._saved_step = position.step

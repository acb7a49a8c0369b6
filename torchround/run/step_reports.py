"""The steps under way: each is reported once it is done, in order, to metrics, traces and checkpoints.

A step is dispatched before the one before it is reported, so that reporting never keeps the devices waiting.
"""

import logging
import shlex
import shutil
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchround.engine.passes import StepResult
from torchround.engine.tracing import StepTraces
from torchround.observe import MetricsLogger
from torchround.observe.console import duration
from torchround.observe.run_page import PAGE_FILE
from torchround.run.checkpoints import RunCheckpoints, RunPosition
from torchround.run.early_end import BadSteps
from torchround.run.run_folder import CONFIG_FILE, RunFolder
from torchround.run.several_machines import RunMachines
from torchround.run.step_meter import StepMeter
from torchround.run.validation import Validated, best_of, kept_losses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dispatched:
    """A step under way: its future result, and the run's position after it.

    `num_tokens` counts the tokens of its batch without padding, which its rate is made of.
    """

    result: StepResult
    position: RunPosition
    lr: float
    num_tokens: int


@dataclass(frozen=True)
class ReportTargets:
    """All that gets a finished step."""

    meter: StepMeter
    metrics: MetricsLogger
    traces: StepTraces
    bad_steps: BadSteps
    checkpoints: RunCheckpoints
    machines: RunMachines = field(default_factory=RunMachines)


class StepReports:
    """The steps of a run that are not reported yet. A record is logged every `log_every_steps`, and of `last_step`."""

    def __init__(self, targets: ReportTargets, log_every_steps: int, last_step: int) -> None:
        self._targets = targets
        self._log_every_steps = log_every_steps
        self._last_step = last_step
        self._under_way: deque[Dispatched] = deque()
        self._newest: Dispatched | None = None
        self._is_ending = False

    @property
    def are_complete(self) -> bool:
        """Whether every dispatched step is reported."""
        return not self._under_way

    def add(self, step: Dispatched) -> None:
        """Add a step that was just dispatched."""
        self._under_way.append(step)

    def report(self, leave: int, validated: Validated | None = None) -> None:
        """Wait for all but the newest `leave` steps, and log those that are due.

        `validated` is what a validation found after the newest step, which is logged with it.
        """
        to = self._targets
        while len(self._under_way) > leave:
            done = self._under_way[0]
            step = done.position.step
            to.meter.add(done.result, done.num_tokens)
            to.traces.add(done.result)
            to.bad_steps.add(step, done.position.tokens - done.result.num_labels, done.result)
            self._newest = done
            is_due = step % self._log_every_steps == 0 or step == self._last_step
            found = validated if len(self._under_way) == 1 else None
            if is_due or found:
                self.log_rest(found)
            # Only now: a step whose report fails stays under way, and is named when the run ends.
            self._under_way.popleft()
            to.checkpoints.reported(step)

    def log_rest(self, validated: Validated | None = None) -> None:
        """Log the steps that were reported since the last record, as the record of the newest. Does nothing without any."""
        to, done = self._targets, self._newest
        if done is not None and to.meter.num_steps:
            step, tokens = done.position.step, done.position.tokens
            found = validated or Validated()
            record = to.meter.record(step, tokens, done.lr, found.loss)
            record = replace(record, samples=found.samples)
            # After a fault the other machines answer no more.
            to.metrics.log(record if self._is_ending else to.machines.merged(record))

    def report_finished(self, updates: int) -> None:
        """After a fault, report the steps up to number `updates`, as far as their figures are still there.

        Never raises: the caller then saves what the fault left.
        """
        self._is_ending = True
        try:
            self.report(leave=sum(step.position.step > updates for step in self._under_way))
        except Exception as error:  # noqa: BLE001  (the fault itself is raised)
            logger.warning("step %d is missing in the metrics: %s", self._under_way[0].position.step, error)
        try:
            self.log_rest()
        except Exception as error:  # noqa: BLE001  (a device that failed may not tell its figures)
            newest = self._newest.position.step if self._newest else 0
            logger.warning("step %d is missing in the metrics: %s", newest, error)


def closing_text(folder: RunFolder, meter: StepMeter, is_chat: bool) -> str:
    """Return the lines at the end of a run: how fast it was, what to open, and how to sample and to export."""
    losses, newest = kept_losses(folder.checkpointer()), folder.checkpointer().latest_step()
    best = best_of(losses)
    step = newest if best is None else best
    of_loss = "" if best is None else f", the best one: validation loss {losses[best]:.4f}"
    option = " --chat" * is_chat + ("" if step == newest else f" --step {step}")
    run, checkpoint = shlex.quote(str(folder.path)), folder.checkpoints / f"step-{step}"
    # In an environment that is not activated the command is beside its Python.
    command = "torchround" if shutil.which("torchround") else Path(sys.executable).with_name("torchround")
    return (
        f"time     {duration(meter.elapsed_s)}, {meter.mean_tokens_per_s():,.0f} tokens/s on average\n"
        f"open     {folder.path / PAGE_FILE}; checkpoint {checkpoint}{of_loss}\n"
        f'next     {command} try_model --run {run}{option} --prompt "..", '
        f"{command} export_hf {shlex.quote(str(checkpoint))} NEW_FOLDER "
        f"--config {shlex.quote(str(folder.path / CONFIG_FILE))}"
    )

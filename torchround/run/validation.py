"""Validation in a run: when it is due, its loss, continuations of prompts, the best one so far, and the end by patience.

The best loss and the validations since are part of every checkpoint. So a resumed run keeps the same best checkpoint, and
ends at the same step, as a run that never stopped.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchround.checkpoint import Checkpointer, CheckpointError
from torchround.config import ValidationTable
from torchround.data import DataError, cut
from torchround.data.step_batches import raise_agreed
from torchround.data.text.chat import Prompt
from torchround.data.text.tokenizer import Tokenizer
from torchround.engine.engine import Engine
from torchround.engine.passes import StepResult, mean_loss
from torchround.generation import generate
from torchround.generation.inference import SAMPLE_CACHE_BYTES
from torchround.layer import MicroBatch
from torchround.observe.record import PromptSample
from torchround.planning.machine_shares import StepShare, step_share
from torchround.run.several_machines import RunMachines

logger = logging.getLogger(__name__)

LARGEST = 2**62  # a number above it is none that a run saved


@dataclass(frozen=True)
class ValidationProgress:
    """The results of a run's validations up to a step. Losses are in nats per label.

    `loss` is the step's own; None if the step was not validated, or its loss is not finite. `best_loss` is the lowest so
    far, first reached at `best_step`; None before the first finite one. `since_best` counts the validations after it.
    """

    loss: float | None = None
    best_loss: float | None = None
    best_step: int = 0
    since_best: int = 0

    @classmethod
    def from_state(cls, state: object) -> "ValidationProgress":
        """Rebuild it from a checkpoint's state. Raises `ValueError` for values that no run could have saved."""
        if isinstance(state, dict) and state.keys() == vars(cls()).keys():
            numbers = state["best_step"], state["since_best"], state["loss"] or 0.0, state["best_loss"] or 0.0
            # Not isinstance: JSON's true is an int in Python.
            if all(type(number) in (int, float) and 0 <= number <= LARGEST for number in numbers):
                return cls(**state)
        raise ValueError(f"validation is {str(state)[:200]}")

    def after(self, step: int, loss: float) -> "ValidationProgress":
        if not math.isfinite(loss):
            return replace(self, loss=None, since_best=self.since_best + 1)
        if self.best_loss is None or loss < self.best_loss:
            return ValidationProgress(loss, loss, step, 0)
        return replace(self, loss=loss, since_best=self.since_best + 1)

    def stop_reason(self, patience: int) -> str | None:
        if patience == 0 or self.since_best < patience:
            return None
        best = "none" if self.best_loss is None else f"{self.best_loss:.4f} at step {self.best_step}"
        return f"no lower loss in {self.since_best} validations (validation.patience = {patience}); the best: {best}"


@dataclass(frozen=True)
class RunValidation:
    """The validations of one run: `batches` are the same each time they are iterated over.

    Each of several machines evaluates its share of each batch, and gives the sums to all. The `prompts` are continued by
    the run's own engine, in the texts of `tokenizer`, up to one of `stop_tokens`.
    """

    table: ValidationTable
    batches: Iterable[MicroBatch]
    micro_batch_size: int
    machines: RunMachines
    prompts: Sequence[Prompt] = ()
    tokenizer: Tokenizer | None = None
    stop_tokens: Sequence[int] = ()

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` is validated whatever follows it: at each interval, and the last step."""
        interval = self.table.interval_steps
        return interval > 0 and (step % interval == 0 or step == last_step)

    def keeps(self, progress: ValidationProgress | None, step: int) -> bool:
        """Whether `step` has the best loss so far and `validation.keep_best` asks for its checkpoint."""
        is_best = progress is not None and progress.loss is not None and progress.best_step == step
        return self.table.keep_best and is_best

    def loss(self, engine: Engine) -> float | None:
        """Return the mean loss per label over the batches with the engine's device weights; None if they have no label.

        Several machines call this alike, and get the same. Raises the same `DataError` on all of them.
        """
        # By batch its labels, and number and loss sum of each micro-batch of this machine's share.
        own: list[list[Any]] = []
        error, machines = None, self.machines
        try:
            under_way: list[tuple[StepShare, StepResult | None, int]] = []
            for batch in self.batches:
                parts = cut(batch, self.micro_batch_size)
                share = step_share(len(parts), 1, machines.rank, machines.size)
                mine = [parts[number] for number in share.micro_batches]
                under_way.append((share, engine.evaluate(mine) if mine else None, batch.num_labels()))
            for share, result, labels in under_way:
                sums = [] if result is None else result.loss_sums()
                own.append([labels, [*zip(share.micro_batches, sums, strict=True)]])
        except DataError as caught:
            if machines.size == 1:
                raise
            error = str(caught)
        found = machines.agree("validation", [error, own], "the validation")
        raise_agreed([text for text, _ in found], machines.names)
        total, num_labels = 0.0, 0
        for alike in zip(*(losses for _, losses in found), strict=True):
            labels = alike[0][0]
            pairs = sorted((pair for _, each in alike for pair in each), key=lambda pair: pair[0])
            # From the mean: the same on any number of machines.
            total += mean_loss([loss for _, loss in pairs], labels) * labels
            num_labels += labels
        if num_labels:
            return total / num_labels
        logger.warning("validation: no token of its batches is learnt, so there is no loss to log")
        return None

    def samples(self, engine: Engine) -> tuple[PromptSample, ...]:
        """Return the continuations with the engine's device weights. All machines call this, and the first one works.

        Each token is the likeliest one, so a text depends on the weights alone, apart from the rounding of logits. The
        other machines wait, so that each batch of prompts is the same as on one. Logits that are not numbers give no
        continuations, and one warning: the step's loss says the same.
        """
        if self.tokenizer is None or not self.prompts:
            return ()
        texts: list[str] = []
        if self.machines.is_first:
            asked, stops = [prompt.tokens for prompt in self.prompts], self.stop_tokens
            most, room, decode = self.table.prompt_tokens, SAMPLE_CACHE_BYTES, self.tokenizer.decode_after
            try:
                found = generate(engine, asked, max_tokens=most, stop_tokens=stops, cache_bytes=room)
                texts = [decode(p, without_end(ids, stops)) for p, ids in zip(asked, found, strict=True)]
            except ValueError as error:
                logger.warning("validation.prompts are not continued: %s", error)
        texts = self.machines.agree("validation", texts, "the continuations of the prompts")[0]
        return tuple(map(PromptSample, (prompt.text for prompt in self.prompts), texts))


def kept_losses(checkpointer: Checkpointer) -> dict[int, float]:
    """Return step and validation loss of each checkpoint whose own step was validated. Reads the state of all."""
    losses = {}
    for step in checkpointer.checkpoints():
        try:
            loss = ValidationProgress.from_state(checkpointer.read_state(step).get("validation")).loss
        except (CheckpointError, ValueError):
            continue  # not validated, or damaged, which listing and loading name
        if loss is not None:
            losses[step] = loss
    return losses


def best_of(losses: Mapping[int, float]) -> int | None:
    return min(sorted(losses), key=losses.__getitem__, default=None)


def without_end(ids: Sequence[int], stop_tokens: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in stop_tokens else ids

"""Steps from epochs: how many steps `data.epochs` make, and how far a run's steps get through them.

Only reading the data tells the number exactly: packing depends on the length of every document. So the run's own loader
reads all epochs once, before the first step. The number is kept in the run's folder with a digest of all that it depends
on, and a resumed run takes it from there. If something has changed since, as the batch size may, the number is the steps
done plus a count of what is left after them.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchround.checkpoint import CheckpointError
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.config import Config, Options
from torchround.data import DataError, Loader, reading_order
from torchround.optim import LRSchedule
from torchround.run.resume import given_folder
from torchround.run.run_folder import RunError, RunFolder
from torchround.untrusted.regular_file import read_regular, write_whole
from torchround.untrusted.strict_json import parse_json
from torchround.untrusted.terminal import say

KEPT_FILE = "epoch_steps.json"
MOST_KEPT_BYTES = 2**12
MOST_STEPS = 2**62
# Data up to this size, all epochs together, is counted even if nothing but a message needs the number: ten seconds.
CHEAP_BYTES = 2**25
TELL_EVERY_S = 10.0
FEW_STEPS = 50

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochSteps:
    """The steps that all epochs of a run's data make, and a digest of what the number depends on."""

    steps: int
    digest: str

    def keep(self, folder: Path) -> None:
        """Write it to the run's folder. Raises `RunError`."""
        try:
            write_whole(folder / KEPT_FILE, json.dumps({"steps": self.steps, "digest": self.digest}) + "\n")
        except OSError as error:
            raise RunError(f"run.folder: {folder} cannot be written: {error}") from error

    @classmethod
    def kept(cls, folder: Path) -> "EpochSteps | None":
        """Return the kept number, None if there is no readable one."""
        try:
            content = parse_json(read_regular(folder / KEPT_FILE, MOST_KEPT_BYTES))
        except (OSError, ValueError):
            return None
        if not isinstance(content, dict) or content.keys() != {"steps", "digest"}:
            return None
        steps, digest = content["steps"], content["digest"]
        is_plain = type(steps) is int and 0 < steps <= MOST_STEPS and isinstance(digest, str)
        return cls(steps, digest) if is_plain else None


def settle_steps(options: Options, loader: Loader, folder: RunFolder) -> tuple[Config, EpochSteps | None]:
    """Return the config with `training.steps` set, and what its epochs make if that was counted.

    Steps that are not given are counted. Steps that are given are compared with the epochs if counting is cheap.
    `loader` is at the start of the data before and after. Raises `ConfigError` if the data cannot be read to its end,
    or if the warm-up takes all steps.
    """
    config = options.config
    epochs, given = config.data.epochs, config.training.steps
    if epochs is None:
        return config, None
    if given is not None:
        with suppress(DataError):  # the run itself reports it when it gets there
            if is_cheap(config, loader):
                found = count_epochs(config, loader, folder)
                if found.steps != given:
                    say(compared_text(config, found.steps))
                return config, found
        return config, None
    try:
        found = count_epochs(config, loader, folder)
    except DataError as error:
        raise options.error("data.sources", f"its steps cannot be counted: {error}") from error
    warmup = config.lr_schedule.warmup_steps
    if warmup >= found.steps:
        raise options.error(
            "lr_schedule.warmup_steps",
            f"given {warmup}, and {_counted(config, found.steps)}; legal: at most {found.steps - 1}",
        )
    say(steps_text(config, found.steps))
    _warn_of_few(config, found.steps)
    return config.with_steps(found.steps), found


def dry_text(config: Config, loader: Loader, folder: RunFolder) -> str | None:
    """Return what a dry run says of steps and epochs: None without epochs, no number if counting would take long."""
    epochs, given = config.data.epochs, config.training.steps
    if epochs is None:
        return None
    if is_cheap(config, loader):
        with suppress(DataError):
            found = count_epochs(config, loader, folder)
            if given is not None:
                return compared_text(config, found.steps)
            _warn_of_few(config, found.steps)
            return steps_text(config, found.steps)
    if given is not None:
        return f"steps    training.steps = {given}, or fewer if {passes(epochs)} have fewer"
    return f"steps    of {passes(epochs)}, counted when the run starts"


def is_cheap(config: Config, loader: Loader) -> bool:
    """Whether counting reads at most `CHEAP_BYTES`. The size of compressed files and datasets says too little."""
    size = loader.size_bytes()
    return size is not None and size * (config.data.epochs or 1) <= CHEAP_BYTES


def count_epochs(
    config: Config, loader: Loader, folder: RunFolder, clock: Callable[[], float] = time.monotonic
) -> EpochSteps:
    """Return the steps of all epochs: the kept number, otherwise counted by reading. Raises `DataError`."""
    beginning = loader.state_dict()
    digest = _digest(config, beginning)
    kept = EpochSteps.kept(folder.path)
    if kept is not None and kept.digest == digest:
        return kept
    done = 0
    start = _saved_start(config, folder)
    try:
        if start is not None:
            done, position = start
            try:
                loader.load_state_dict(position)
            except DataError:
                # Resuming refuses this position and says why. The run must not look complete before it does.
                return EpochSteps(done + 1, digest)
        return EpochSteps(max(done + _count_batches(config, loader, clock), 1), digest)
    finally:
        loader.load_state_dict(beginning)


def _count_batches(config: Config, loader: Loader, clock: Callable[[], float]) -> int:
    """Read the loader to its end. Says now and then how far it is."""
    epochs = config.data.epochs or 1
    batches, told_s = 0, clock()
    with _quiet(reading_order.logger):
        for _ in loader:
            batches += 1
            now_s = clock()
            # Steps that are given are counted in silence: only if that is cheap, and nothing waits for the number.
            if config.training.steps is None and now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                say(
                    f"steps    counting them: {batches:,} in {loader.epochs_read():.2f} of {passes(epochs)} "
                    "(training.steps = N saves this reading)"
                )
    return batches


@contextmanager
def _quiet(of: logging.Logger) -> Iterator[None]:
    """Drop the warnings of bad records that are skipped: the run warns of each when it comes to it."""
    level = of.level
    of.setLevel(logging.ERROR)
    try:
        yield
    finally:
        of.setLevel(level)


def _saved_start(config: Config, folder: RunFolder) -> tuple[int, dict[str, Any]] | None:
    """Return step and data position of the checkpoint that the run will resume from, None for a run from the start."""
    checkpointer = folder.checkpointer()
    paths = [path for _, path in reversed(checkpointer.checkpoints().items())]
    given = given_folder(config)
    if not paths and given is not None and config.checkpoint.load == "all":
        paths = [given]
    for path in paths:
        try:
            manifest = read_manifest(path, is_part=checkpointer.is_part)
            position = read_state(path, manifest).get("data")
        except CheckpointError:
            continue  # resuming names the damage, and takes the checkpoint before
        return (manifest.step, position) if isinstance(position, dict) else None
    return None


def _digest(config: Config, beginning: dict[str, Any]) -> str:
    """Return a digest of all that the number of batches depends on. Several streams are part of the beginning."""
    data = config.data.model_dump(mode="json", exclude={"num_workers", "on_changed_files", "streams"})
    sizes = (config.training.seq_len, config.training.global_batch_size)
    return hashlib.sha256(json.dumps([beginning["data"], data, sizes], sort_keys=True).encode()).hexdigest()


# Texts.


def passes(epochs: int) -> str:
    """Return `1 epoch`, `2 epochs` and so on."""
    return f"{epochs} epoch{'s' if epochs > 1 else ''}"


def steps_text(config: Config, steps: int) -> str:
    """Return the line that gives the steps of the epochs."""
    return f"steps    {_counted(config, steps)}"


def _warn_of_few(config: Config, steps: int) -> None:
    """Warn of epochs that make so few steps that a model hardly learns from them."""
    if steps < FEW_STEPS:
        logger.warning(
            "%s, and with fewer than about %d a model hardly learns; for more: a smaller training.global_batch_size (it is "
            "%d), a smaller training.seq_len (%d) if the documents are shorter, more data.epochs (%d), or more data",
            *(_counted(config, steps), FEW_STEPS, config.training.global_batch_size),
            *(config.training.seq_len, config.data.epochs),
        )


def _counted(config: Config, steps: int) -> str:
    epochs = config.data.epochs or 1
    return f"{passes(epochs)} {'are' if epochs > 1 else 'is'} {steps:,} step{'s' if steps > 1 else ''}"


def compared_text(config: Config, steps: int) -> str:
    """Return a line that compares `steps`, which the epochs make, with the given `training.steps`."""
    epochs, given = config.data.epochs or 1, config.training.num_steps
    text = f"{steps_text(config, steps)}; training.steps = {given:,}"
    if given < steps:
        return f"{text} ends the run after {_rounded(epochs * given / steps)} of {passes(epochs)}"
    if given == steps:
        return text
    schedule = LRSchedule(config.lr_schedule, config.optimizer.lr, given)
    return f"{text} will not be reached{_unfinished_schedule(schedule, steps)}"


def end_of_data_text(schedule: LRSchedule, step: int) -> str:
    """Return why a run ended whose data ended after `step` steps, and at what learning rate it did."""
    return f"the data has come to its end{_unfinished_schedule(schedule, step)}"


def more_by(config: Config, counted: EpochSteps | None) -> str:
    """Return the key that makes a complete run longer."""
    ends_with_data = counted is not None and counted.steps <= config.training.num_steps
    return "data.epochs" if ends_with_data else "training.steps"


def unread_text(config: Config, loader: Loader, counted: EpochSteps | None) -> str:
    """Return how much of the epochs a complete run has read, if some of them is left; otherwise nothing.

    If the steps of the epochs were not `counted`, the loader tells about how much it was.
    """
    epochs = config.data.epochs
    if epochs is None:
        return ""
    read = loader.epochs_read() if counted is None else epochs * config.training.num_steps / counted.steps
    return "" if read >= epochs else f"; {_rounded(read)} of {passes(epochs)} of its data are read"


def _rounded(epochs: float) -> str:
    """Return a number of passes with one decimal, or one digit if it is below a tenth."""
    return f"{epochs:.1f}" if epochs >= 0.1 else f"{epochs:.1g}"


def _unfinished_schedule(schedule: LRSchedule, step: int) -> str:
    """Say that the learning rate has not reached its end after `step` steps; nothing if it has."""
    reached, end = schedule(max(step - 1, 0)), schedule(schedule.total_steps - 1)
    if reached == end:
        return ""
    return (
        f", at a learning rate of {reached:.2e} instead of {end:.2e} at step {schedule.total_steps}; without "
        "training.steps the schedule ends with the data"
    )

"""The steps that `data.epochs` make, if `training.steps` does not say how long the run is.

Packing depends on the length of every document, so the loader reads what is left of the data once before the first step.
The learning rate then reaches its end with the data.
"""

import time
from typing import Any

from torchround.checkpoint import CheckpointError
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.config import Config, Options
from torchround.data import DataError, Loader
from torchround.run.resume import given_folder
from torchround.run.run_folder import RunFolder
from torchround.untrusted.terminal import say

TELL_EVERY_S = 10.0


def settle_steps(options: Options, loader: Loader, folder: RunFolder) -> Config:
    """Return the config with `training.steps` set. `loader` is at the start of the data before and after.

    Raises `ConfigError` if the data cannot be read to its end, or if the warm-up takes all steps.
    """
    config = options.config
    if config.training.steps is not None:
        return config
    try:
        steps = count_steps(config, loader, folder)
    except DataError as error:
        raise options.error("data.sources", f"its steps cannot be counted: {error}") from error
    text, warmup = (
        f"data.epochs = {config.data.epochs} makes {steps:,} steps",
        config.lr_schedule.warmup_steps,
    )
    if warmup >= steps:
        raise options.error(
            "lr_schedule.warmup_steps", f"given {warmup}, and {text}; legal: at most {steps - 1}"
        )
    say(f"steps    {text}")
    return config.with_steps(steps)


def count_steps(config: Config, loader: Loader, folder: RunFolder) -> int:
    """Count the steps done and the batches that are left, so that a resumed run may have another batch size.

    Raises `DataError`.
    """
    beginning = loader.state_dict()
    done, position = _saved_start(config, folder)
    try:
        if position is not None:
            loader.load_state_dict(position)
    except DataError:
        return (
            done + 1
        )  # resuming refuses this position and says why: the run must not look complete before it does
    told_s, batches = time.monotonic(), 0
    try:
        for batches, _ in enumerate(loader, start=1):
            if time.monotonic() - told_s >= TELL_EVERY_S:
                told_s = time.monotonic()
                say(f"steps    counting them: {batches:,} (training.steps = N saves this reading)")
    finally:
        loader.load_state_dict(beginning)
    return max(done + batches, 1)


def _saved_start(config: Config, folder: RunFolder) -> tuple[int, dict[str, Any] | None]:
    """Return step and data position of the checkpoint that the run will resume from, 0 and None without one."""
    checkpointer = folder.checkpointer()
    paths = [path for _, path in reversed(checkpointer.checkpoints().items())]
    given = given_folder(config)
    if not paths and given is not None and config.checkpoint.load == "all":
        paths = [given]
    for path in paths:
        try:
            manifest = read_manifest(path, is_part=checkpointer.is_part)
            return manifest.step, read_state(path, manifest).get("data")
        except CheckpointError:
            continue  # resuming names the damage, and takes the checkpoint before
    return 0, None

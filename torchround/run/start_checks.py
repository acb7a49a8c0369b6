"""What can be known to go wrong before anything large is allocated: no room for checkpoints, no checkpoint to start from."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from torchround.checkpoint import CheckpointError, NoCheckpointError, open_checkpoint
from torchround.checkpoint.fsync import free_bytes_at
from torchround.config import CheckpointTable, Config, ValidationTable
from torchround.planning.memory import size_text
from torchround.planning.run_question import RunQuestion
from torchround.run.resume import given_folder, require_steps_left
from torchround.run.run_folder import RunError, RunFolder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskNeed:
    """The disk of a run's checkpoints: what one takes, how many are there at once, and what is free.

    `num_present` complete checkpoints are there already. `free_bytes` includes what the next save clears away first; it
    is None if the file system does not say.
    """

    folder: Path
    checkpoint_bytes: int
    num_at_once: int
    num_present: int
    free_bytes: int | None

    def text(self) -> str:
        """Return the need and what is free, on one line."""
        several = f", up to {self.num_at_once} at once" if self.num_at_once > 1 else ""
        there = f" ({self.num_present} there already)" if self.num_present else ""
        free = "" if self.free_bytes is None else f"; {size_text(self.free_bytes)} are free"
        return f"a checkpoint takes {size_text(self.checkpoint_bytes)}{several}{there}{free}"

    def require_one(self) -> None:
        """Raise `RunError` if not one checkpoint fits. One warning if fewer fit than the run keeps."""
        if self.free_bytes is None:
            return
        if self.checkpoint_bytes > self.free_bytes:
            raise RunError(
                f"run.folder: {self.folder}: {self.text()}, so nothing could be saved. Free some space, or choose a "
                "folder on another disk (--run.folder FOLDER)"
            )
        missing = max(1, self.num_at_once - self.num_present)
        if missing * self.checkpoint_bytes > self.free_bytes:
            logger.warning(
                "run.folder: %s: %s, so the disk will be full before the run ends; a lower checkpoint.keep_latest_k "
                "or another disk (run.folder) avoids that",
                self.folder,
                self.text(),
            )


def disk_need(config: Config, folder: RunFolder, question: RunQuestion) -> DiskNeed:
    """Count what the run's checkpoints take and what its disk has. Nothing is written."""
    checkpointer = folder.checkpointer()
    leftovers = sum(map(_folder_bytes, checkpointer.leftovers()))
    free_bytes = free_bytes_at(folder.path)
    return DiskNeed(
        folder=folder.path,
        checkpoint_bytes=-(-checkpoint_bytes(question) // (folder.team.size if checkpointer.is_part else 1)),
        num_at_once=num_at_once(config.checkpoint, config.training.steps, config.validation),
        num_present=len(checkpointer.complete_steps()),
        free_bytes=None if free_bytes is None else free_bytes + leftovers,
    )


def checkpoint_bytes(question: RunQuestion) -> int:
    """Count the tensors of one checkpoint: all that the host holds, except gradients and the newest device weights.

    The newest device weights of trained parameters are the float32 weights, rounded, so they are saved only if they are a part
    of split weights. Those take as much as float32 weights.
    """
    count, older_versions = question.parameters, int(question.update == "async")
    in_dtype = older_versions * count.trained + count.frozen + _num_stale(question)
    return question.updates.saved_bytes(count.by_rule) + question.element_bytes * in_dtype


def _num_stale(question: RunQuestion) -> int:
    """Count the trained parameters of the stale layers, whose older device weights are saved too."""
    layers = question.costs().layers[: question.stale_layers or 0] if question.update == "bounded" else ()
    return sum(layer.gradient_bytes for layer in layers) // question.accumulate_bytes


def num_at_once(
    table: CheckpointTable, total_steps: int | None, validation: ValidationTable | None = None
) -> int:
    """Return the most checkpoints that are on the disk at once: the kept ones, and the one that is being written.

    Without `total_steps`, which may not be counted yet, it leaves out those that are kept for ever.
    """
    best = int(validation is not None and validation.keep_best)
    if total_steps is None:
        return table.keep_latest_k + 1 + best if table.keep_latest_k else 1
    interval = table.interval_steps or total_steps
    num_saves = -(-total_steps // interval)
    if validation is not None and best:
        num_saves += total_steps // validation.interval_steps
    if not table.keep_latest_k:
        return num_saves
    for_ever = 0
    if table.keep_every_n_steps:
        for_ever = total_steps // math.lcm(interval, table.keep_every_n_steps)
    return min(num_saves, table.keep_latest_k + 1 + best + for_ever)


def require_load_path(config: Config, folder: RunFolder) -> None:
    """Raise `RunError` if the run would start from `checkpoint.load_path` and there is no such checkpoint.

    Only names and sizes are looked at; loading reads the contents.
    """
    path = given_folder(config)
    checkpointer = folder.checkpointer()
    if path is None or checkpointer.checkpoints():
        return
    try:
        step = open_checkpoint(path, checkpointer.is_part).step
    except NoCheckpointError as error:
        if checkpointer.is_part and not folder.team.is_alone:
            return  # it may be on the disks of other machines, and loading asks all
        raise RunError(f"checkpoint.load_path: {error}") from error
    except CheckpointError as error:
        raise RunError(f"checkpoint.load_path: {error}") from error
    steps_are_known = config.training.steps is not None or config.data.epochs is None
    if config.checkpoint.load == "all" and steps_are_known:
        require_steps_left(config, path, step)


def _folder_bytes(path: Path) -> int:
    """Return the bytes that deleting a folder frees. Deleting a link frees nothing."""
    try:
        return 0 if path.is_symlink() else sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0  # deleted meanwhile, or not readable

"""List the checkpoints of a run, and verify them.

    torchround checkpoint list outputs/my-run
    torchround checkpoint verify outputs/my-run

The folder is a run's, or its `checkpoints`; `verify` also takes one checkpoint, reads every byte and compares checksums.
The exit code is 1 if a checkpoint is damaged.
"""

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path

from torchround.checkpoint import Checkpointer, CheckpointError, ForeignCheckpointError, verify_checkpoint
from torchround.checkpoint.folders import MANIFEST_FILE, RUN_SUBFOLDER, is_checkpoint_name
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.commands import CommandError, end_with_message, new_parser
from torchround.planning.memory import size_text
from torchround.planning.plan import text_table
from torchround.run.validation import best_of, kept_losses
from torchround.untrusted.terminal import Progress, terminal_safe


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = new_parser(__doc__)
    parser.add_argument("command", choices=("list", "verify"))
    parser.add_argument("folder", type=Path, help="a run's folder, or its checkpoints")
    options = parser.parse_args(arguments)
    work = {"list": list_all, "verify": verify}[options.command]
    return end_with_message(lambda: work(options.folder), (CommandError, CheckpointError, OSError))


def list_all(folder: Path) -> int:
    """Print a table of the checkpoints by rising step, then of those that are being written or deleted, or were when a run was killed.

    Tensors are not read, so `complete` says that all files have their sizes, not that they are sound.
    """
    checkpointer = Checkpointer(checkpoints_of(folder))
    there, losses = checkpointer.checkpoints(), kept_losses(checkpointer)
    rows, any_damaged = [["folder", "size", "written", "validation loss", "condition"]], False
    for step, path in there.items():
        condition = "complete"
        try:
            read_state(path, read_manifest(path, step))
        except CheckpointError as error:
            is_foreign = isinstance(error, ForeignCheckpointError)
            reason = str(error).removeprefix(f"checkpoint {path}: ")  # the row names the path already
            condition = reason if is_foreign else f"damaged: {reason}"
            any_damaged |= not is_foreign
        best = ", the best" if step == best_of(losses) else ""
        loss = f"{losses[step]:.4f}{best}" if step in losses else ""
        rows.append(_row(path, loss, condition))
    rows += [_row(path, "", "unfinished") for path in checkpointer.leftovers()]
    print(text_table(rows, num_names=5))
    return int(any_damaged)


def _row(path: Path, loss: str, condition: str) -> list[str]:
    size, written = "", ""
    with suppress(OSError):  # a running process has deleted it meanwhile, or it is a link to nothing
        size = size_text(sum(file.lstat().st_size for file in path.iterdir()))
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return [path.name, size, written, loss, terminal_safe(condition)]


def verify(folder: Path) -> int:
    """Read every byte of the checkpoints. Returns 1 if one is damaged, otherwise 0."""
    if (folder / MANIFEST_FILE).exists() or is_checkpoint_name(folder.name):
        paths = [folder]
    else:
        paths = list(Checkpointer(checkpoints_of(folder)).checkpoints().values())
    if not paths:
        raise CommandError(f"{folder}: there are no checkpoints")
    num_damaged = 0
    for path in paths:
        try:
            total = sum(record.size_bytes for record in read_manifest(path).files.values())
            verify_checkpoint(path, Progress(f"reading {path}", total, size_text).advance)
            print(f"checkpoint {path}: sound")
        except CheckpointError as error:
            if path != folder and not path.exists():
                continue  # a run has deleted it meanwhile
            print(error, file=sys.stderr)
            num_damaged += 1
    print(f"{num_damaged} are damaged" if num_damaged else "all are sound")
    return int(num_damaged > 0)


def checkpoints_of(folder: Path) -> Path:
    folder = folder.absolute()
    found = folder if folder.name == RUN_SUBFOLDER else folder / RUN_SUBFOLDER
    if not found.is_dir():
        raise CommandError(f"{found} is not there; legal: a run's folder, or its folder {RUN_SUBFOLDER}")
    return found

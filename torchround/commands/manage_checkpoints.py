"""List the checkpoints of a run, and verify them.

    torchround checkpoint list outputs/my-run
    torchround checkpoint verify outputs/my-run

The folder is a run's, or its `checkpoints`; `verify` also takes one checkpoint, reads every byte and compares checksums.

Exit codes: 0 sound, 1 a checkpoint is damaged, 2 an argument cannot be used.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchround.checkpoint import Checkpointer, CheckpointError, ForeignCheckpointError, verify_checkpoint
from torchround.checkpoint.folders import is_checkpoint_name
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.commands import CommandError, new_parser
from torchround.planning.memory import size_text
from torchround.planning.plan import text_table
from torchround.run.validation import kept_losses
from torchround.untrusted.terminal import Progress, terminal_safe

CHECKPOINTS = "checkpoints"


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (("list", "list checkpoints and leftovers"), ("verify", "compare every checksum")):
        command = commands.add_parser(name, help=does)
        command.add_argument("folder", type=Path, help="a run's folder, or its checkpoints")
    options = parser.parse_args(arguments)
    try:
        return {"list": list_all, "verify": verify}[options.command](options.folder)
    except (CommandError, CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def list_all(folder: Path) -> int:
    """Print a table of the checkpoints and leftovers in the folder.

    Tensors are not read, so `complete` says that all files have their sizes, not that they are sound.
    """
    checkpointer = Checkpointer(checkpoints_of(folder))
    losses = {checkpointer.checkpoints()[step]: loss for step, loss in kept_losses(checkpointer).items()}
    best = min(losses, key=losses.__getitem__, default=None)
    rows, any_damaged = [["folder", "size", "written", "validation loss", "condition"]], False
    for path, condition in conditions(checkpointer):
        with suppress(FileNotFoundError):  # a running process has deleted it meanwhile
            if path.is_symlink():
                condition += f", a link to {path.readlink()}"
            is_there = path.is_dir()  # not so for a link to a disk that is not there
            size_bytes = sum(file.lstat().st_size for file in path.iterdir()) if is_there else 0
            written = time.localtime((path.stat() if is_there else path.lstat()).st_mtime)
            loss = f"{losses[path]:.4f}{', the best' * (path == best)}" if path in losses else ""
            size, day = size_text(size_bytes), time.strftime("%Y-%m-%d %H:%M", written)
            rows.append([path.name, size, day, loss, terminal_safe(condition)])
            any_damaged |= condition.startswith("damaged")
    print(text_table(rows, num_names=5))
    return int(any_damaged)


def conditions(checkpointer: Checkpointer) -> Iterator[tuple[Path, str]]:
    """Yield each folder and its condition: checkpoints by rising step, then leftovers of killed saves."""
    for step, path in checkpointer.checkpoints().items():
        condition, prefix = "complete", f"checkpoint {path}: "  # the row names the path already
        try:
            read_state(path, read_manifest(path, step))
        except ForeignCheckpointError as error:
            condition = str(error).removeprefix(prefix)
        except CheckpointError as error:
            condition = f"damaged: {str(error).removeprefix(prefix)}"
        yield path, condition
    for path in checkpointer.leftovers():
        is_new = path.suffix == ".tmp"
        yield path, "being written, or left by a killed save" if is_new else "being deleted"


def verify(folder: Path) -> int:
    """Read every byte of the checkpoints. Returns 1 if one is damaged, otherwise 0."""
    if (folder / "manifest.json").exists() or is_checkpoint_name(folder.name):
        paths = [folder]
    else:
        paths = list(Checkpointer(checkpoints_of(folder)).checkpoints().values())
    if not paths:
        raise CommandError(f"{folder}: there are no checkpoints")
    num_there = num_sound = 0
    for path in paths:
        fault = fault_of(path)
        if fault is not None and path != folder and not path.exists():
            print(f"checkpoint {path}: deleted meanwhile, as a run does with old ones")
            continue
        print(fault or f"checkpoint {path}: sound", file=sys.stderr if fault else sys.stdout)
        num_there, num_sound = num_there + 1, num_sound + (fault is None)
    print(f"{num_sound} of {num_there} are sound")
    return int(num_sound < num_there)


def fault_of(path: Path) -> CheckpointError | None:
    """Read every byte, and return what is not as it was written."""
    try:
        total = sum(record.size_bytes for record in read_manifest(path).files.values())
        verify_checkpoint(path, Progress(f"reading {path}", total, size_text).advance)
    except CheckpointError as error:
        return error
    return None


def checkpoints_of(folder: Path) -> Path:
    """Return the folder `checkpoints` of a run; the run's folder and `checkpoints` itself are both accepted."""
    folder = folder.absolute()
    found = folder if folder.name == CHECKPOINTS else folder / CHECKPOINTS
    if not found.is_dir():
        raise CommandError(f"{found} is not there; legal: a run's folder, or its folder {CHECKPOINTS}")
    return found

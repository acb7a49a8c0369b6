"""List the checkpoints of a run, verify them, and delete the ones that its rules do not keep.

    torchround checkpoint list outputs/my-run
    torchround checkpoint verify outputs/my-run
    torchround checkpoint prune outputs/my-run --dry-run

The folder is a run's, or its `checkpoints`; `verify` also takes one `step-N`. `verify` reads every byte and compares
checksums. `prune` deletes the checkpoints that the run's `[checkpoint]` keys (or `--keep-latest-k`,
`--keep-every-n-steps`) do not keep, and the leftovers of killed saves. It never deletes the newest sound checkpoint, nor
the best one of a run with `validation.keep_best`, and deletes nothing while a process works in the run's folder. Exit codes: 0 sound, 1 a checkpoint is damaged, 2 an
argument cannot be used.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchround.checkpoint import Checkpointer, CheckpointError, ForeignCheckpointError, verify_checkpoint
from torchround.checkpoint.folders import is_checkpoint_name
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.commands import CommandError
from torchround.config import CheckpointTable, ConfigError, RunTable, load_config
from torchround.planning.memory import size_text
from torchround.run.resume import BEFORE
from torchround.run.run_folder import RunError, RunFolder
from torchround.run.validation import best_of, keeps_best, kept_losses
from torchround.untrusted.terminal import terminal_safe

CHECKPOINTS = "checkpoints"
AGE_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    options = parse(arguments)
    try:
        return {"list": list_all, "verify": verify, "prune": prune}[options.command](options)
    except (CommandError, CheckpointError, ConfigError, RunError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line: a subcommand and its folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("list", "list checkpoints and leftovers"),
        ("verify", "compare every checksum"),
        ("prune", "delete the checkpoints that are not kept"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("folder", type=Path, help="a run's folder, or its checkpoints")
        if name == "prune":
            command.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
            command.add_argument("--keep-latest-k", type=int, help="instead of the run's own")
            command.add_argument("--keep-every-n-steps", type=int, help="instead of the run's own")
    return parser.parse_args(arguments)


def list_all(options: argparse.Namespace) -> int:
    """Print a table of the checkpoints and leftovers in the folder.

    Tensors are not read, so `complete` says that all files have their sizes, not that they are sound.
    """
    from rich.console import Console  # importing rich draws random numbers, which an import must not
    from rich.table import Table
    from rich.text import Text

    table = Table("folder", "size", "age", "condition", "optimizer", "validation loss", "run", box=None)
    any_damaged = False
    checkpointer = Checkpointer(checkpoints_of(options.folder))
    losses = {checkpointer.checkpoints()[step]: loss for step, loss in kept_losses(checkpointer).items()}
    best = min(losses, key=losses.__getitem__, default=None)
    for path, condition, state in conditions(checkpointer):
        with suppress(FileNotFoundError):  # a running process has deleted it meanwhile
            if path.is_symlink():
                condition += f", a link to {terminal_safe(path.readlink())}"
            is_there = path.is_dir()  # not so for a link to a disk that is not there
            size_bytes = sum(file.lstat().st_size for file in path.iterdir()) if is_there else 0
            age_s = time.time() - (path.stat() if is_there else path.lstat()).st_mtime
            loss = f"{losses[path]:.4f}{', the best' * (path == best)}" if path in losses else ""
            # Texts, because a table reads strings as markup.
            texts = [Text(terminal_safe(told)) for told in (optimizer_in(state), loss, name_in(state))]
            table.add_row(path.name, size_text(size_bytes), age(age_s), Text(condition), *texts)
            any_damaged |= condition.startswith("damaged")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return int(any_damaged)


def conditions(checkpointer: Checkpointer) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield each folder, its condition and its state: checkpoints by rising step, then leftovers of killed saves.

    The state is empty if it cannot be read.
    """
    for step, path in checkpointer.checkpoints().items():
        condition, state = "complete", {}
        try:
            state = read_state(path, read_manifest(path, step))
        except ForeignCheckpointError as error:
            condition = reason(error, path)
        except CheckpointError as error:
            condition = f"damaged: {reason(error, path)}"
        yield path, condition, state
    for path in checkpointer.leftovers():
        is_new = path.suffix == ".tmp"
        yield path, "being written, or left by a killed save" if is_new else "being deleted", {}


def name_in(state: dict[str, Any]) -> str:
    """Return the run's name from a checkpoint's state, or "" if the state is not a run's."""
    try:
        return str(state["config"]["run"]["name"])
    except (KeyError, TypeError):
        return ""


def optimizer_in(state: dict[str, Any]) -> str:
    """Return name and state format of a run's optimizer, such as `muon, compact`; "" if the state is not a run's."""
    config = state.get("config")
    table = config.get("optimizer") if isinstance(config, dict) else None
    if not isinstance(table, dict):
        return ""
    return ", ".join(str(table.get(key, BEFORE["optimizer", key])) for key in ("name", "state"))


def verify(options: argparse.Namespace) -> int:
    """Read every byte of the checkpoints. Returns 1 if one is damaged, otherwise 0."""
    folder = options.folder
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
    """Read every byte, and return what is not as it was written. Shows a progress bar on a terminal."""
    from rich.console import Console  # importing rich draws random numbers, which an import must not
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        try:
            total = sum(record.size_bytes for record in read_manifest(path).files.values())
            task = bar.add_task(f"reading {path}", total=total)
            verify_checkpoint(path, lambda nbytes: bar.advance(task, nbytes))
        except CheckpointError as error:
            return error
    return None


def prune(options: argparse.Namespace) -> int:
    """Delete by the rules, holding the lock that a running process would hold."""
    run = checkpoints_of(options.folder).parent
    with RunFolder(RunTable(name=run.name, folder=str(run.parent))) as folder:
        latest, every = keep_rules(options, run)
        checkpointer = Checkpointer(folder.checkpoints, latest, every)
        checkpointer.best_step = best_to_keep(checkpointer)
        doomed = checkpointer.superfluous()
        if doomed:  # otherwise nothing has to be spared, and reading every byte of a checkpoint takes long
            newest = newest_sound(checkpointer)
            doomed = [path for path in doomed if path != newest]
        if not (doomed := [*checkpointer.leftovers(), *doomed]):
            print("nothing to delete")
        for path in doomed:
            print(f"{'would delete' if options.dry_run else 'deleting'} {path}")
        if not options.dry_run:
            checkpointer.delete(doomed)
    return 0


def keep_rules(options: argparse.Namespace, run: Path) -> tuple[int, int]:
    """Return `keep_latest_k` and `keep_every_n_steps`: the given ones, otherwise the run's."""
    own = CheckpointTable()
    if options.keep_latest_k is None or options.keep_every_n_steps is None:
        if (run / "config.toml").exists():
            own = load_config(run / "config.toml").checkpoint
        elif options.keep_latest_k is None:
            raise CommandError(f"{run / 'config.toml'} is not there; --keep-latest-k says how many to keep")
    latest = own.keep_latest_k if options.keep_latest_k is None else options.keep_latest_k
    every = own.keep_every_n_steps if options.keep_every_n_steps is None else options.keep_every_n_steps
    if latest < 0 or every < 0:
        raise CommandError(
            f"--keep-latest-k and --keep-every-n-steps are at least 0, got {latest} and {every}"
        )
    return latest, every


def best_to_keep(checkpointer: Checkpointer) -> int | None:
    """Return the step with the lowest validation loss, if the run of the newest checkpoint keeps it."""
    for step, path in reversed(checkpointer.checkpoints().items()):
        try:
            state = read_state(path, read_manifest(path, step))
        except CheckpointError:
            continue
        return best_of(kept_losses(checkpointer)) if keeps_best(state) else None
    return None


def newest_sound(checkpointer: Checkpointer) -> Path | None:
    """Find the newest checkpoint whose bytes all verify. Sizes alone do not show damage."""
    for path in reversed(checkpointer.checkpoints().values()):
        if (fault := fault_of(path)) is None:
            return path
        print(fault, file=sys.stderr)
    return None


def checkpoints_of(folder: Path) -> Path:
    """Return the folder `checkpoints` of a run; the run's folder and `checkpoints` itself are both accepted."""
    folder = folder.absolute()
    found = folder if folder.name == CHECKPOINTS else folder / CHECKPOINTS
    if not found.is_dir():
        raise CommandError(f"{found} is not there; legal: a run's folder, or its folder {CHECKPOINTS}")
    return found


def reason(error: CheckpointError, path: Path) -> str:
    """Return the error's message without the path, which the row names already."""
    return str(error).removeprefix(f"checkpoint {path}: ")


def age(seconds: float) -> str:
    """Format an age in the largest unit of which it has at least one. A clock may be behind the folder's."""
    if seconds < 0:
        return "in the future"
    unit_s, unit = next((pair for pair in AGE_UNITS if seconds >= pair[0]), AGE_UNITS[-1])
    return f"{seconds / unit_s:.0f} {unit}"

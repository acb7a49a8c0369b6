"""The commands that users start, how each is started, and how it ends. They alone know the model families.

`torchround COMMAND ..` is installed with the package; `train.py` and `scripts/` in a clone start the same commands.
"""

import argparse
import atexit
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from torchround.untrusted.terminal import escape_unprintable

# Name on the command line: module, seen from this room, and what the command does. A module has a `main(arguments)` that
# returns the exit code.
COMMANDS = {
    "doctor": ("doctor", "say what this machine has and which configs fit it"),
    "plan": ("plan_run", "plan a run for this machine or another one: time, memory, what would help"),
    "inspect_data": ("inspect_data", "show the sequences that a run would read"),
    "finetune": ("finetune", "fine-tune a released model on your data: torchround finetune MODEL DATA"),
    "train": ("train_model", "train a model, or resume: torchround train --config NAME.toml"),
    "page": ("draw_page", "draw the metrics of runs as an HTML page"),
    "checkpoint": ("manage_checkpoints", "list and verify the checkpoints of a run"),
    "try_model": ("try_model", "score text with a trained model, and continue prompts"),
    "export_hf": ("export_hf", "export a checkpoint as a Hugging Face folder"),
    "simulate": (".simulate.command", "simulate pipeline schedules side by side"),
}


class CommandError(Exception):
    """A command line that a command cannot work with; the message says what is wrong and what is legal."""


def new_parser(description: str | None) -> argparse.ArgumentParser:
    shown = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=shown, allow_abbrev=False)


def positive_integer(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main() -> NoReturn:
    run_command(_start_named)


def _start_named(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in COMMANDS:
        sys.argv[0] = f"torchround {name}"  # argparse takes its usage line from here
        code: int = import_module(f".{COMMANDS[name][0]}", __name__).main(rest)
        return code
    lines = [f"  {command:<12}  {does}" for command, (_, does) in COMMANDS.items()]
    usage = "\n".join(["usage: torchround COMMAND ..", *lines, "torchround COMMAND --help says more."])
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"torchround: there is no command {name}\n{usage}", file=sys.stderr)
    return 2


def run_command(command: Callable[[list[str]], int]) -> NoReturn:
    """Run a command with the arguments of this process, and exit with its code.

    A reader that closes our output early, as `| head` does, ends the command without a traceback. Any other broken pipe
    is a fault of the command, and raises. Output that cannot be written, as on a full disk, is one message and code 1.
    """
    code: int | str | None
    try:
        code = command(sys.argv[1:])
    except SystemExit as end:  # argparse, after --help or a mistake
        code = end.code
    except BrokenPipeError:
        poll = select.poll()
        if sys.stdout is not None:
            poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
        if not poll.poll(0):  # its other end is open, as that of a file or a terminal always is
            raise
        code = 128 + signal.SIGPIPE
    if sys.stdout is not None:  # None if it was closed before the start, as by `>&-`
        try:
            sys.stdout.flush()
        except OSError as error:
            # Python flushes once more at exit. What is left in the buffer must then have somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                print(f"standard output cannot be written: {error}", file=sys.stderr)
                code = code or 1
    # Python would end daemon threads as they come back to it from a library, in C++, where a slow network holds them. That
    # unwinds the library's own frames, which aborts the process in place of its exit code.
    if isinstance(code, int | None) and any(thread.daemon for thread in threading.enumerate()):
        if not code:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError):  # closed, or full
                stream.flush()
        os._exit(code or 0)
    sys.exit(code)


def end_with_message(
    work: Callable[[], int | None],
    mistakes: tuple[type[Exception], ...],
    faults: tuple[type[Exception], ...] = (),
) -> int:
    """Do the work of a command. Returns its exit code: 2 after one of `mistakes`, 1 after one of `faults`, each one message."""
    try:
        return work() or 0
    except mistakes as error:
        print(escape_unprintable(str(error)), file=sys.stderr, flush=True)
        return 2
    except faults as error:
        # Imported here, so that `torchround --help` need not load them.
        from torchround.engine.errors import PipelineError
        from torchround.machines.group import MachineError

        # The cause is an error inside a stage or a worker, often in a model's own code: only its traceback says where.
        # An error on another machine has no traceback here.
        if isinstance(error, PipelineError) and not isinstance(error.__cause__, MachineError | None):
            traceback.print_exception(error.__cause__)
        print(f"{type(error).__name__}: {escape_unprintable(str(error))}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
